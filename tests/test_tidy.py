"""Rules of the source that no linter knows."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
from pathlib import Path

import pytest
from source_tree import ROOT, modules, tree

LINES_MAX = 500
SOURCES = (".py", ".pyx", ".pyi", ".c", ".h", ".proto", ".toml", ".md", ".yaml", ".yml")


@functools.cache
def tracked():
    """The files that git knows, or, outside of a repository (an sdist), all below the project's folders."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode == 0:
        names = listed.stdout.split("\n")
        return [ROOT / name for name in names if name and (ROOT / name).is_file()]
    return [p for folder in ("psd", "psd_core", "clients", "tests", "proto") for p in (ROOT / folder).rglob("*") if p.is_file()]


def sources(*suffixes, under=""):
    """Tracked text files with one of these endings."""
    return [p for p in tracked() if p.suffix in (suffixes or SOURCES) and p.relative_to(ROOT).as_posix().startswith(under)]


@functools.cache
def text_of(path):
    """A file's text: thirty tests look at it."""
    return path.read_text()


@functools.cache
def lines_of(path):
    """Its lines."""
    return text_of(path).splitlines()


def lines_with(pattern, files):
    """Places of a pattern, as file:line."""
    search = re.compile(pattern).search
    return [
        f"{path.relative_to(ROOT)}:{number}"
        for path in files
        if path != Path(__file__)
        for number, line in enumerate(lines_of(path), 1)
        if search(line)
    ]


def test_no_file_is_too_long():
    """A file has one purpose, and at most 500 lines."""
    long = {
        str(p.relative_to(ROOT)): n for p in sources(".py", ".pyx", ".c", ".h") if (n := text_of(p).count("\n")) > LINES_MAX
    }

    assert long == {}


def test_every_module_says_what_it_is_for():
    """Every module, test modules included, begins with a docstring."""
    begins = re.compile(r'(?:#.*\n)*"""\S').match  # to parse them all would take seconds
    silent = [str(p.relative_to(ROOT)) for p in sources(".py") if not begins(text_of(p)) and p.name != "setup.py"]

    assert silent == []
    assert len(modules()) > 50


def test_no_docstring_is_empty_words():
    """A docstring that says nothing is deleted."""
    empty = lines_with(r'^\s*"""[.\s]*"""\s*$', sources(".py"))

    assert empty == []


@pytest.mark.parametrize("under", ["psd", "clients"])
def test_no_docstring_only_points_elsewhere(under):
    """What overrides a method says so with @override, which type checkers look at; anything else has words of its own."""
    assert lines_with(r'^\s*r?"""See \S+?[.:]?("""|$| )', sources(".py", ".pyx", under=under)) == []


@pytest.mark.parametrize("under", ["psd", "clients", "benchmarks", "examples", "docs", "setup.py"])
def test_docstrings_begin_with_a_verb_or_a_noun(under):
    """A reader of one docstring knows what is meant without the name beside it: "Name of the file", not "Of the file"."""
    begins = r'^\s*r?"""(What|Of|By|Whether|From|For|How|Why|When|Where|Who|Whose|As|To|If|Likewise)\b'

    assert lines_with(begins, sources(".py", ".pyx", under=under)) == []


@pytest.mark.parametrize(
    ("pattern", "suffixes", "under"),
    [
        (r"\b(TODO|FIXME|XXX|HACK)\b", (), ""),
        (r"pytest\.mark\.(skip\b|xfail)|unittest\.skip", (".py",), "tests/"),
        (r"\btime\.sleep\(|\bfrom time import .*sleep", (".py",), "tests/"),
        (r"-march=|-ffast-math", (".py", ".toml", ".pyx"), "psd"),
        (r"^\s*(?!#)[^#]*['\"]-(march=native|ffast-math)", (".py", ".toml"), ""),
        (r"\bpickle\b|allow_pickle=True", (".py", ".pyx"), "psd"),
        (r"^\s*(import|from) (pickle|marshal|shelve)\b|allow_pickle=True", (".py",), "clients"),
        (r"\btorch\.load\((?!.*weights_only=True)|\b(eval|exec)\(", (".py",), "psd"),
        (r"\btorch\.load\((?!.*weights_only=True)|\b(eval|exec)\(", (".py",), "clients"),
        (r"freethreading_compatible", (".py", ".pyx", ".toml"), ""),
        (r"\bprint\(", (".py",), "psd/state"),
        (r"/work/|/home/\w", (".py", ".toml", ".md", ".proto", ".yaml"), ""),
        (r"\b127\.0\.0\.1:[1-9]\d*", (".py",), "tests/rim"),
    ],
)
def test_what_must_not_be_there(pattern, suffixes, under):
    """No unfinished work, skipped tests, sleeps, flags that break other machines, pickles, paths of one machine, or promises
    that no test holds: the state relies on the GIL."""
    assert lines_with(pattern, sources(*suffixes, under=under)) == []


def test_generated_code_is_not_committed():
    """Protobuf modules and C files made from .pyx are made when building."""
    names = [p.relative_to(ROOT).as_posix() for p in tracked()]
    generated_c = {p.with_suffix(".c").relative_to(ROOT).as_posix() for p in sources(".pyx")}

    assert [n for n in names if re.search(r"_pb2(_grpc)?\.pyi?$|\.so$|\.egg-info", n) or n in generated_c] == []


def test_test_modules_have_names_of_their_own():
    """pytest imports test modules by base name, so no two may share one; what a folder's tests share is imported likewise.
    Each sitecustomize is of programs that tests start, which Python finds by their path."""
    names = [p.stem for p in sources(".py", under="tests/") if p.stem not in ("conftest", "sitecustomize")]

    assert sorted(n for n in set(names) if names.count(n) > 1) == []


@pytest.mark.parametrize("folder", ["state", "rim", "contract"])
def test_every_test_says_what_it_shows(folder):
    """A test's docstring is the property in one sentence."""
    silent = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
        for path in sources(".py", under=f"tests/{folder}/")
        for node in ast.walk(tree(path))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and not ast.get_docstring(node)
    ]

    assert silent == []
