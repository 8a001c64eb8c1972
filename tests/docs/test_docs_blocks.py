"""Every block of code in the README and the pages of docs/ does what it should; those of Keras and JAX are in tests/keras.

With PSD_PICTURES=DIR the pictures that programs of docs/course draw are saved there, as those in docs/images/course were made.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
from block_runner import KERAS_PAGES, SMALLER, PageRunner
from forwarded_commands import ForwardedCommands
from markdown_blocks import RUN, SHOWN, Block, blocks, pages
from source_tree import ROOT

OURS = [page for page in pages() if page.relative_to(ROOT).as_posix() not in KERAS_PAGES]
DRAWN = ROOT / "docs" / "images" / "course"


@pytest.fixture
def page_of(tmp_path, monkeypatch):
    """page_of(text) -> a page with that text."""
    monkeypatch.setattr("markdown_blocks.ROOT", tmp_path)

    def written(text):
        (tmp_path / "page.md").write_text(text)
        return tmp_path / "page.md"

    return written


def pictures_of_course(page: Path) -> list[str]:
    """Names of the pictures on a page that its own programs draw."""
    return re.findall(rf"\]\(\.\./{DRAWN.relative_to(ROOT / 'docs')}/([^)]+)\)", page.read_text())


def every_block() -> list[Block]:
    return [block for page in pages() for block in blocks(page)]


@pytest.fixture
def commands(tmp_path_factory):
    """Folder with commands that find psd and torch loaded."""
    with ForwardedCommands(tmp_path_factory.mktemp("programs") / "commands") as folder:
        yield folder


@pytest.mark.process
@pytest.mark.usefixtures("later_compiler")
@pytest.mark.parametrize("page", OURS, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_blocks_of_a_page_run(page, tmp_path, commands):
    """The README's in interpreters of their own, as a reader's."""
    pytest.importorskip("torch")

    with PageRunner(tmp_path, None if page == ROOT / "README.md" else commands) as runner:
        runner.run_page(page)

    drawn = pictures_of_course(page)
    assert [name for name in drawn if not (tmp_path / name).is_file()] == []
    if folder := os.environ.get("PSD_PICTURES"):
        for name in drawn:
            shutil.copy(tmp_path / name, Path(folder))


def test_each_page_of_the_course_shows_what_its_programs_draw():
    """And nothing is kept that no page shows."""
    shown = {page.name: pictures_of_course(page) for page in (ROOT / "docs" / "course").glob("*.md") if page.name != "index.md"}

    assert len(shown) == 6
    assert [page for page, names in shown.items() if not names] == []
    assert sorted(name for names in shown.values() for name in names) == sorted(path.name for path in DRAWN.iterdir())


def test_a_block_is_run_or_says_why_not():
    """There is no language that no test runs, and nothing that looks like a command hides among what is only shown."""
    unknown = [f"{block.where}: {block.language}" for block in every_block() if block.language not in RUN + SHOWN]
    hidden = [
        f"{block.where}: {line}"
        for block in every_block()
        if block.language == "text" and "not run" not in block.marks
        for line in block.text.splitlines()
        if re.match(r"(\$ |psd-run |psd-server |psdctl |python |pip |make |kubectl |import )", line)
    ]

    assert unknown == []
    assert hidden == []


def test_each_size_that_is_made_smaller_is_on_a_page():
    texts = [block.text for block in every_block()]

    assert [size for size in SMALLER if not any(size in text for text in texts)] == []


def test_most_blocks_are_run():
    """What is not run is the exception: what needs a cluster, a registry, or hours."""
    runnable = [block for block in every_block() if block.language in RUN]
    not_run = [block for block in runnable if "not run" in block.marks]

    assert len(runnable) >= 40
    assert len(not_run) <= len(runnable) / 3, [f"{block.where}: {block.marks['not run']}" for block in not_run]


@pytest.mark.parametrize(
    ("page", "says"),
    [
        ("```\nls\n```\n", "needs a language and an end"),
        ("```bash\nls\n", "needs a language and an end"),
        ("```python lines=3\n1\n```\n", "expected title="),
        ("<!-- background -->\nwords\n```bash\nls\n```\n", "a mark that no block follows: background"),
        ("<!-- continues -->\n```python\nx\n```\n", "begins with '# goes on"),
        ("<!-- not run -->\n```bash\nls\n```\n", "not run: expected something after the colon"),
    ],
)
def test_a_page_with_a_mistake_in_its_marks_is_refused(page, says, page_of):
    with pytest.raises(ValueError, match=says):
        blocks(page_of(page))


@pytest.mark.parametrize(
    ("page", "says"),
    [
        ("```bash\ntrue\nfalse\n```\n", "page.md:1: ended with status 1"),
        ("<!-- fails: no -->\n```bash\necho no\n```\n", "ended with status 0"),
        ("<!-- prints: yes -->\n```bash\necho no\n```\n", "expected 'yes'"),
        ("<!-- background -->\n```bash\npsd-server --shard 1/1\n```\n", "ended before a shard was ready"),
        ("<!-- background -->\n```bash\nexit 3\n```\n", "ended with status 3"),
        ("```python\nimport psd_client\npsd_client.connect(rank=-1)\n```\n", "page.md:1: ConfigError: rank"),
        ("```python\nx = 1\n```\n```python\nprint(x)\n```\n", "page.md:4: NameError"),
        ("```ruby\n1\n```\n", "no test knows what to do with 'ruby'"),
    ],
)
def test_a_block_that_does_not_work_is_named(page, says, page_of, tmp_path):
    with PageRunner(tmp_path) as runner, pytest.raises(AssertionError, match=re.escape(says)):
        runner.run_page(page_of(page))
