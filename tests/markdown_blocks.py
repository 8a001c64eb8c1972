"""Code blocks of Markdown pages, and the marks before them that say how a test runs them.

A mark is an HTML comment right before the block, so that neither the site nor a code host shows it:

    <!-- not run: REASON -->    the block is only shown; the reason is for whoever reads the page's source
    <!-- background -->         commands that go on while the next blocks run; they must end well before the page does
    <!-- continues -->          Python that goes on with names and job of the block before; its first line says so
    <!-- fails: WORDS -->       the last command must fail, and say these words
    <!-- prints: WORDS -->      the output must have these words

Nothing runs that is not shown: a reader who pastes a block into a fresh interpreter gets what the test gets.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from source_tree import ROOT

RUN = ("python", "bash")
"""Languages whose blocks are run."""

SHOWN = ("text", "yaml")
"""Languages of what is shown: diagrams, output, files; yaml must at least parse."""

_COMMENT = re.compile(r"<!--\s*(.*?)\s*-->", re.DOTALL)
_FENCE = re.compile(r"^```(.*)$")
_MARK = re.compile(r"(not run|background|continues|fails|prints)\b:?\s*(.*)", re.DOTALL)
_GOES_ON = "# goes on after the block above\n"


@dataclass(frozen=True)
class Block:
    """A fenced block: where it begins, its language, the file that its title names, its text, and its marks by name."""

    where: str
    language: str
    title: str
    text: str
    marks: dict[str, str]


def pages() -> list[Path]:
    """Every page that users and maintainers read, and so has blocks to run."""
    names = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "deploy/README.md", "tests/README.md")
    return [*(ROOT / name for name in names), *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path) -> list[Block]:
    """The blocks of a page in their order; ValueError if a mark is unknown, or a fence has no language or no end."""
    found: list[Block] = []
    marks: dict[str, str] = {}
    lines = page.read_text().split("\n")
    number = 0
    while number < len(lines):
        line = lines[number]
        where = f"{page.relative_to(ROOT)}:{number + 1}"
        if line.startswith("<!--"):
            comment = line
            while "-->" not in comment:
                number += 1
                comment += "\n" + lines[number]
            marks |= _marks(comment, where)
        elif fence := _FENCE.match(line):
            end = next((i for i in range(number + 1, len(lines)) if lines[i] == "```"), None)
            if end is None or not fence[1]:
                raise ValueError(f"{where}: a block needs a language and an end")
            language, _, rest = fence[1].partition(" ")
            title = re.fullmatch(r'title="([^"]+)"', rest)
            if rest and not title:
                raise ValueError(f'{where}: expected title="...", got {rest}')
            if not language.startswith("{"):  # a directive of the site's, not code
                body = "\n".join(lines[number + 1 : end]) + "\n"
                if body.startswith(_GOES_ON) != ("continues" in marks):
                    raise ValueError(f"{where}: a block that continues another one begins with {_GOES_ON!r}, and no other does")
                found.append(Block(where, language, title[1] if title else "", body, marks))
            marks, number = {}, end
        elif line.strip():
            if set(marks) - {"not run"}:
                raise ValueError(f"{where}: a mark that no block follows: {', '.join(marks)}")
            marks = {}
        number += 1
    return found


def _marks(comment: str, where: str) -> dict[str, str]:
    text = _COMMENT.fullmatch(comment.strip())
    mark = _MARK.fullmatch(text[1]) if text else None
    if mark is None:
        return {}  # an ordinary comment, such as those that docs/generated.py replaces
    if mark[1] in ("not run", "fails", "prints") and not mark[2]:
        raise ValueError(f"{where}: {mark[1]}: expected something after the colon")
    return {mark[1]: mark[2]}
