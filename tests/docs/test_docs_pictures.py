"""The pictures of the README and of docs/ are what their scripts draw of the figures and of the recording that are there."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from loaded_programs import WITH_TORCH, completed
from markdown_blocks import pages
from source_tree import ROOT

IMAGES = ROOT / "docs" / "images"
DARK = r'<source media="\(prefers-color-scheme: dark\)" srcset="(.+)-dark\.svg">'
PICTURE = re.compile(r"<picture>\n  " + DARK + r'\n  <img alt=".+" src="(.+)\.svg">\n</picture>')


def run(*command: object) -> None:
    done = completed([*map(str, command)], cwd=ROOT, loads=WITH_TORCH, generations=2)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def drawn(tmp_path_factory) -> dict[str, str]:
    """What the scripts draw, by the name of the file."""
    folder: Path = tmp_path_factory.mktemp("pictures")
    run("docs/charts.py", "--out", folder)
    run("docs/timelines.py", "--out", folder)
    run("docs/recording.py", "--draw", "--out", folder)
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_every_picture_is_what_its_script_draws(drawn):
    """A figure that is changed in a table is changed in its chart: `make pictures` does so."""
    changed = [name for name, text in drawn.items() if not (IMAGES / name).exists() or (IMAGES / name).read_text() != text]

    assert changed == []
    assert len(drawn) >= 18


def test_a_picture_is_whole_and_loads_nothing(drawn):
    for name, text in drawn.items():
        label = ET.fromstring(text).get("aria-label")
        assert label, name
        assert not re.search(r"(href|src|url|import|script)\b", text.replace("http://www.w3.org/2000/svg", "")), name


def test_every_picture_is_on_a_page_in_both_schemes(drawn):
    shown = [pair for page in pages() for pair in PICTURE.findall(page.read_text())]

    assert [pair for pair in shown if pair[0] != pair[1]] == []
    assert {Path(light).name for _, light in shown} == {name.removesuffix(".svg") for name in drawn if "-dark" not in name}
    assert sum(page.read_text().count("<picture>") for page in pages()) == len(shown)


@pytest.mark.process
@pytest.mark.usefixtures("later_compiler")
def test_a_shard_is_killed_and_the_result_is_the_same(tmp_path):
    """The recording can be made: both runs learn the same to the last digit, else the script fails."""
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    if not Path("/proc/self/stat").exists():
        pytest.skip("the script finds the shard in /proc")

    steps = 80  # far more than 10, so that the shard is killed well before it has ended
    run("docs/recording.py", "--kill-at", 10, "--out", tmp_path, "--", "--data", "digits", "--steps", steps, "--batch-size", 32)

    log = (tmp_path / "killed-shard.log").read_text()
    assert log.count("kill -9") == 1
    assert "1 restart of shards" in log
