"""docs/guarantees.md: every error class has its line, and every test that it, or the page on tables, names is there."""

import ast
import re

from source_tree import ROOT, tree

from psd.contract.errors import reasons

PAGE = (ROOT / "docs" / "guarantees.md").read_text()


def test_every_error_that_a_program_may_get_has_a_line():
    table = PAGE[PAGE.index("## After an error") :]
    firsts = " ".join(line.split("|")[1] for line in table.splitlines() if line.startswith("| `"))
    assert set(re.findall(r"`([A-Z]\w+)`", firsts)) == set(reasons())


def test_every_test_that_a_page_names_is_there():
    tables = (ROOT / "docs" / "design" / "tables.md").read_text()
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", PAGE + tables)
    assert len(named) > 40
    for path, name in named:
        functions = {node.name for node in ast.walk(tree(ROOT / path)) if isinstance(node, ast.FunctionDef)}
        assert functions, path
        assert not name or name in functions, f"{path}::{name}"


def test_every_line_says_by_what_it_is_shown():
    """By a footnote, which names a test; there is none that no line has."""
    notes = dict(re.findall(r"^\[\^([\w-]+)\]: (.+)$", PAGE, re.MULTILINE))
    lines = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith(("| promise", "| error"))]
    of_lines = [re.findall(r"\[\^([\w-]+)\]", line.split("|")[1]) for line in lines]

    assert len(lines) > 30
    assert [line for line, named in zip(lines, of_lines, strict=True) if not named] == []
    assert set(re.findall(r"\[\^([\w-]+)\](?!:)", PAGE)) == set(notes)
    assert [name for name, tests in notes.items() if "`tests/" not in tests] == []
