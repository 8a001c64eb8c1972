"""Keywords of a job and of a connection stand in one place, and every call that takes them shows all, and refuses others."""

from __future__ import annotations

import inspect
import pydoc
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

import psd_client
from psd.contract.keywords import DEFAULTS, ConnectKeywords, FaceKeywords, JobKeywords, LinkKeywords, takes


def calls() -> list[tuple[Callable[..., Any], Any]]:
    found: list[tuple[Callable[..., Any], Any]] = [
        (psd_client.connect, ConnectKeywords),
        (psd_client.ParameterServer.declare, JobKeywords),
    ]
    face = pytest.importorskip("psd_client.torch")
    return [*found, (face.distribute, FaceKeywords)]


@pytest.mark.parametrize("kind", [JobKeywords, LinkKeywords, ConnectKeywords], ids=lambda kind: kind.__name__)
def test_each_keyword_has_its_meaning(kind: Any) -> None:
    """A keyword without a line, or a line without a keyword, is a slip of who has added it."""
    inherited = LinkKeywords.__annotations__ if kind is ConnectKeywords else {}
    described = re.findall(r"^ {4}(\w[\w, ]*): ", inspect.cleandoc(kind.__doc__), re.MULTILINE)
    words = [name for names in described for name in names.split(", ")]

    assert words == [name for name in kind.__annotations__ if name not in inherited]


def test_calls_show_every_keyword_with_type_default_and_meaning() -> None:
    """In the signature, and so in help(); and in the docstring, where the mark is gone."""
    for call, kind in calls():
        parameters, text = inspect.signature(call).parameters, pydoc.render_doc(call)
        for name in kind.__annotations__:
            parameter = parameters[name]
            assert parameter.default == DEFAULTS.get(name), (call, name)
            assert f"{name}: '{parameter.annotation}' = {parameter.default!r}" in text, (call, name)
            assert re.search(rf"^ +([\w, ]+, )?{name}(, [\w, ]+)?: \w|^ +{name}: \"", text, re.MULTILINE), (call, name)
        assert not [each for each in parameters.values() if each.kind is each.VAR_KEYWORD]
        assert "**" not in text.partition("Args:")[2]


def test_other_keywords_are_refused_as_python_would() -> None:
    """The message names the function and the keyword, and suggests the most similar one, the call's own included."""
    for call, wrong, likely in [
        (psd_client.connect, "server", "servers"),
        (psd_client.connect, "rol", "role"),
        (psd_client.ParameterServer.declare, "consistancy", "consistency"),
        (psd_client.ParameterServer.declare, "group", "groups"),
        (calls()[-1][0], "overlaps", "overlap"),
        (calls()[-1][0], "wait_timout", "wait_timeout"),
    ]:
        words = f"{call.__qualname__}() got an unexpected keyword argument {wrong!r}; did you mean {likely!r}?"
        with pytest.raises(TypeError, match=f"^{re.escape(words)}$"):
            call(**{wrong: 1})
    with pytest.raises(TypeError, match=r"^connect\(\) got an unexpected keyword argument 'zzz'$"):
        psd_client.connect(zzz=1)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"declare\(\) missing 1 required positional argument: 'params'"):
        psd_client.ParameterServer.declare(None, quorum=1)  # type: ignore[call-arg, arg-type]


def test_a_call_without_docstrings_takes_them_as_well() -> None:
    """As under python -OO."""
    source = "import psd_client; assert psd_client.connect.__doc__ is None; psd_client.connect(server=1)"
    ended = subprocess.run([sys.executable, "-OO", "-c", source], capture_output=True, text=True, check=False)

    assert "connect() got an unexpected keyword argument 'server'; did you mean 'servers'?" in ended.stderr


def test_a_new_keyword_is_shown_by_every_call_that_takes_its_kind() -> None:
    class More(JobKeywords, total=False):
        """More.

        Attributes:
            speed: how fast.
        """

        speed: float | None

    @takes(More)
    def call(first: int, **job: Any) -> dict[str, Any]:
        """Do it.

        Args:
            **job

        Raises:
            Nothing: ever.
        """
        return job

    assert list(inspect.signature(call).parameters) == ["first", *JobKeywords.__annotations__, "speed"]
    assert "    speed: how fast.\n\nRaises:" in (call.__doc__ or "")
    assert call(1, speed=2.0) == {"speed": 2.0}
