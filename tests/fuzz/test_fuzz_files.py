"""Files and settings that somebody else may have written: checkpoints, arenas, tokens, certificates, addresses, variables.

Documents of a checkpoint, and an arena's front, are also changed with their checksums put right: what is behind those is to
hold, too.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fuzzing import allocates_at_most, ends_in, fuzzed
from hypothesis import given
from hypothesis import strategies as st

from psd.checkpoint import safetensors
from psd.checkpoint.ends import EndNote, common_cut, to_settle
from psd.checkpoint.manifest import ManifestDocument, parse_part
from psd.checkpoint.sealing import FORMAT, FORMAT_VERSION, seal, unseal
from psd.contract.config import ConfigError, is_loopback, is_rule_path, parse_address, parse_servers, parse_shard
from psd.contract.consistency import Consistency
from psd.contract.environment import VARIABLES, client_config, job_defaults
from psd.contract.errors import CheckpointCorrupt, CheckpointUnsupported, PsdError
from psd.contract.jobspec import JobSpec
from psd.contract.layout import Layout
from psd.contract.staleness import parse_staleness
from psd.contract.tls import client_files, server_files
from psd.contract.tokens import parse_token, parse_tokens, presented
from psd.v1 import data_pb2, job_pb2
from psd_core import _arena_format as form
from psd_core._store_format import FRONT
from psd_core.arena import Arena, ArenaCorrupt, BlockShape

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts | st.sampled_from([-1, 1 << 70, "////", "sgd"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)

# -- checkpoints -----------------------------------------------------------------------------------------------------------

UNREADABLE = (CheckpointCorrupt, CheckpointUnsupported)
GOLDEN = Path(__file__).parents[1] / "checkpoint" / "golden"
NAME = "timeline-00000-step-000000000007-a1"
MANIFEST, PART = ((GOLDEN / name).read_bytes() for name in ("manifest.json", "shard-00000-of-00002.json"))

GOLDEN_TABLES = GOLDEN.with_name("golden_tables")
TABLES_NAME = "timeline-00000-step-000000000008-a8"
TABLES_MANIFEST, TABLES_PART = ((GOLDEN_TABLES / name).read_bytes() for name in ("manifest.json", "shard-00000-of-00001.json"))


def altered(data: st.DataObject, whole: bytes) -> bytes:
    """A document with one value, at any depth, in another's place, and with the right checksum."""
    document = unseal(whole, "x")
    place: Any = document
    while True:
        keys = list(place) if isinstance(place, dict) else range(len(place))
        key = data.draw(st.sampled_from(keys))
        if not (isinstance(place[key], (dict, list)) and place[key] and data.draw(st.booleans())):
            break
        place = place[key]
    if data.draw(st.booleans()) and isinstance(place, dict):
        del place[key]
    else:
        place[key] = data.draw(json_values)
    return seal(document)


@fuzzed
@given(st.data())
def test_manifests(data: st.DataObject) -> None:
    """A manifest with a wrong value is corrupt, by name; one whose value does not matter is a checkpoint."""
    part = parse_part(PART, "p", ManifestDocument(MANIFEST, NAME).identity, 0)

    ends_in(UNREADABLE, lambda: ManifestDocument(altered(data, MANIFEST), NAME).with_parts([part, part]))


@fuzzed
@given(st.data())
def test_parts_of_checkpoints(data: st.DataObject) -> None:
    """Likewise the document of a part, and what the manifest makes of it."""
    document = ManifestDocument(MANIFEST, NAME)

    def read() -> Any:
        return document.with_parts([parse_part(altered(data, PART), "p", document.identity, 0)])

    ends_in(UNREADABLE, read)


@fuzzed
@given(st.data())
def test_checkpoints_of_tables(data: st.DataObject) -> None:
    """Likewise where tables build on another checkpoint, which is not there."""
    document = ManifestDocument(TABLES_MANIFEST, TABLES_NAME)
    part = parse_part(TABLES_PART, "p", document.identity, 0)

    def read() -> Any:
        return document.with_parts([parse_part(altered(data, TABLES_PART), "p", document.identity, 0)])

    ends_in(UNREADABLE, read)
    ends_in(UNREADABLE, lambda: ManifestDocument(altered(data, TABLES_MANIFEST), TABLES_NAME).with_parts([part]))


@fuzzed
@given(st.data())
def test_end_notes(data: st.DataObject) -> None:
    """A shard's note at its end is corrupt, or makes a cut with another's, or says why it does not."""
    layout = Layout(JobSpec.from_message(job_pb2.JobSpec.FromString(base64.b64decode(unseal(MANIFEST, "x")["job_spec"]))), 2)
    settled = data_pb2.PullRequest(decisions=[job_pb2.Decision(round=6, members=b"\x03")], verdict=job_pb2.Verdict(round=6))
    own = EndNote("run", 0, "00", 7, {"a round": ["version 7"]}, 0, 1.0, settled.SerializeToString().hex())
    whole = seal({"format": FORMAT, "format_version": FORMAT_VERSION, "facts": dataclasses.asdict(own)})

    def agree() -> Any:
        note = EndNote.parse(unseal(altered(data, whole), "n").get("facts"))
        return (to_settle({0: own, 1: note}), common_cut({0: own, 1: note}, layout)) if note.job == own.job else None

    ends_in(PsdError, agree)


@fuzzed
@given(st.binary(max_size=200) | json_values.map(lambda value: json.dumps(value).encode()))
def test_sealed_documents(body: bytes) -> None:
    """Anything under a right checksum: a document of psd's, or corrupt."""
    sealed = seal({"format": "psd-checkpoint", "format_version": 1})
    made = body + sealed[sealed.index(b',\n "checksum"') :]

    ends_in(UNREADABLE, lambda: unseal(made, "x"))
    ends_in(UNREADABLE, lambda: unseal(body, "x"))


@fuzzed
@given(
    st.binary(max_size=100)
    | st.dictionaries(
        texts,
        st.fixed_dictionaries(
            {
                "dtype": st.sampled_from(["F32", "U8", "X"]) | json_values,
                "shape": st.lists(st.integers(-1, 5) | json_values, max_size=3) | json_values,
                "data_offsets": st.lists(st.integers(0, 20) | json_values, max_size=3) | json_values,
            }
        )
        | json_values,
        max_size=3,
    ).map(lambda header: json.dumps(header).encode())
)
def test_safetensors_headers(header: bytes) -> None:
    """Tensors that lie one behind the other, or a ValueError."""
    found = ends_in(ValueError, lambda: safetensors.parse_header(header))

    if found is not None:
        entries, _ = found
        assert all(entry.stop - entry.start >= 0 for entry in entries)


# -- the arena -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def arena_file(tmp_path: Path) -> Path:
    """A small arena that is not in use."""
    arena = Arena.create(tmp_path / "a", meta=b"meta", shapes=[BlockShape("float32", 10, 1, 2)] * 2, workers=3)
    for block in range(2):
        arena.publish(block, arena.spare(block), 1)
    arena.close(remove=False)
    return tmp_path / "a" / "arena"


def open_and_close(path: Path) -> None:
    arena = Arena.open(path.parent)
    if arena is not None:
        for block in range(len(arena.shapes)):
            arena.current(block)
        arena.close(remove=False)


@fuzzed
@given(data=st.data())
def test_arenas(arena_file: Path, data: st.DataObject) -> None:
    """A file with any bytes in any place, cut off anywhere, is refused, or it is an arena."""
    whole = arena_file.read_bytes()
    changed = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, 400) | st.integers(0, len(whole) - 8))
        changed[at : at + 8] = struct.pack("<Q", data.draw(st.integers(0, 2**64 - 1) | st.integers(0, 300)))
    try:
        arena_file.write_bytes(changed[: data.draw(st.just(len(whole)) | st.integers(0, len(whole)))])
        ends_in(ArenaCorrupt, lambda: open_and_close(arena_file))
    finally:
        arena_file.write_bytes(whole)


@fuzzed
@given(st.tuples(*[st.integers(0, 2**32 - 1) | st.integers(0, 5)] * 2), st.binary(max_size=200))
def test_fronts_of_arenas(numbers: tuple[int, int], rest: bytes) -> None:
    """Numbers of workers and blocks as one likes, under the right checksum: no more is read or made than is there."""
    workers, blocks = numbers
    file = form.SUPERBLOCK.pack(struct.pack("<III4x", workers, blocks, form.WORD_SLOTS) + rest)

    with allocates_at_most(4096):
        front = ends_in(ArenaCorrupt, lambda: form.read_front(reading(file), len(file)))
    if front is not None:
        assert front.fixed == form.read_front(reading(front.fixed), len(front.fixed)).fixed == file


@fuzzed
@given(st.integers(0, 2**64 - 1) | st.integers(0, 200), st.binary(max_size=200))
def test_lengths_in_superblocks(nbytes: int, rest: bytes) -> None:
    """Any length is refused before so much is read."""
    file = FRONT.pack(form.SUPERBLOCK.magic, form.SUPERBLOCK.version, 0x01020304, nbytes, 0) + rest

    with allocates_at_most(4096):
        ends_in(ArenaCorrupt, lambda: form.read_front(reading(file), len(file)))


def reading(file: bytes) -> Callable[[int, int], bytes]:
    """Reads a file's bytes."""
    return lambda nbytes, start: file[start : start + nbytes]


# -- who is let in ---------------------------------------------------------------------------------------------------------

SECRET = "a-secret-of-32-characters-1234567"
lines = st.lists(
    texts | st.sampled_from([f"worker {SECRET}", f"reader {SECRET} x", "admin short", "# x", "", SECRET]), max_size=4
)


@fuzzed
@given(lines.map("\n".join))
def test_token_files(text: str) -> None:
    """Roles and tokens, or one line that says which line is wrong, and never what stands there."""
    for parse in (parse_tokens, parse_token):
        said = said_by(lambda parse=parse: parse(text, "FILE"))
        assert said.startswith("FILE")
        assert "secret" not in said


def said_by(call: Callable[[], Any]) -> str:
    """The words of a ConfigError, behind the name of the file."""
    try:
        call()
    except ConfigError as error:
        return str(error)
    return "FILE"


@fuzzed
@given(
    st.lists(
        st.tuples(st.sampled_from(["authorization", "x"]), texts | st.binary(max_size=20) | st.just("Bearer x")), max_size=3
    )
)
def test_tokens_in_metadata(metadata: list[tuple[str, str | bytes]]) -> None:
    """One token's digest, or nothing."""
    digest = presented(metadata)

    assert digest is None or len(digest) == 32


@fuzzed
@given(
    st.tuples(
        *[
            st.binary(max_size=100)
            | st.binary(max_size=50).map(lambda x, kind=kind: b"-----BEGIN %s-----\n%s\n-----END %s-----\n" % (kind, x, kind))
            for kind in (b"CERTIFICATE", b"CERTIFICATE", b"PRIVATE KEY")
        ]
    )
)
def test_certificates(tmp_path_factory: pytest.TempPathFactory, contents: tuple[bytes, ...]) -> None:
    """Bytes in the place of certificates and keys: an error that names the setting and the file."""
    directory = tmp_path_factory.getbasetemp()
    paths = [str(directory / name) for name in ("ca", "cert", "key")]
    for path, content in zip(paths, contents, strict=True):
        Path(path).write_bytes(content)
    ca, cert, key = paths

    for files in (client_files(ca, "", ""), server_files(cert, key, ca), client_files(ca, cert, key)):
        with pytest.raises(ConfigError, match=r"tls.(ca|cert|key|client-ca).*: .*/(ca|cert|key)"):
            files.load()


# -- settings --------------------------------------------------------------------------------------------------------------

words = texts | st.sampled_from(["127.0.0.1:7000", "[::1]:0", "h:99999", "0/2", "ssp:3", "dc:0.5", "1e999", "-1", "m.x:Y"])

DECODERS: list[tuple[Callable[[str], Any], tuple[type[Exception], ...]]] = [
    (lambda text: parse_address(text, "x"), (ConfigError,)),
    (parse_servers, (ConfigError,)),
    (parse_shard, (ConfigError,)),
    (is_loopback, ()),
    (is_rule_path, ()),
    (Consistency.parse, (PsdError,)),
    (parse_staleness, (PsdError,)),
]


@fuzzed
@given(words)
def test_words(text: str) -> None:
    """Addresses, shards, modes: a value, or the error that says what was expected."""
    for decode, errors in DECODERS:
        ends_in(errors, lambda decode=decode: decode(text))


@fuzzed
@given(st.dictionaries(st.sampled_from(sorted(VARIABLES)), words))
def test_the_environment(environ: dict[str, str]) -> None:
    """Settings, or an error that names the variable or the setting."""
    config = ends_in(ConfigError, lambda: client_config(environ=environ))
    ends_in((ConfigError, PsdError), lambda: job_defaults(environ))

    assert config is None or np.isfinite(config.wait_timeout_s)
