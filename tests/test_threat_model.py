"""docs/threat-model.md says of everything that a peer can send how much of it is accepted."""

from __future__ import annotations

import re
from typing import Any

from source_tree import ROOT

from psd.contract.config import Limits
from psd.contract.settings import settings_of
from psd.v1 import bulk_pb2, control_pb2, data_pb2, vectors_pb2

TEXT = (ROOT / "docs" / "threat-model.md").read_text()
FROM_WORKERS = ("BulkHello", "BulkAttach", "BulkCall")


def fields(descriptor: Any, found: set[str]) -> set[str]:
    """Fields of a message and all that may be in it, as Message.field; `caller` is the same everywhere."""
    for field in descriptor.fields:
        name = f"{descriptor.name}.{field.name}"
        if name not in found:
            if field.name != "caller":
                found.add(name)
            if field.message_type is not None:
                fields(field.message_type, found)
    return found


def test_every_field_that_a_peer_can_send_has_a_limit_in_the_table() -> None:
    found: set[str] = set()
    for file in (control_pb2, data_pb2, vectors_pb2):
        for service in file.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                fields(method.input_type, found)
    for name in FROM_WORKERS:
        fields(bulk_pb2.DESCRIPTOR.message_types_by_name[name], found)

    named = set(re.findall(r"`([A-Z]\w+\.[a-z]\w*)`", TEXT))

    assert len(found) > 80
    assert sorted(found - named) == []
    assert sorted(name for name in named - found if not name.startswith("README")) == []


def test_the_files_that_check_limits_are_there() -> None:
    """What the table's last column names."""
    named = re.findall(r"`((?:rim|state|contract|checkpoint)/\w+\.py)`", TEXT)

    assert [name for name in named if not (ROOT / "psd" / name).is_file()] == []


def test_every_limit_that_is_a_flag_is_in_the_table() -> None:
    flags = [setting.flag_of(name) for name, setting in settings_of(Limits).items()]

    assert len(flags) > 15
    assert [flag for flag in flags if f"`{flag}`" not in TEXT] == []
