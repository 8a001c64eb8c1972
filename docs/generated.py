"""What the site takes from elsewhere in the repository, so that nothing is written twice. A line of a page such as

    <!-- include: README.md -->              a Markdown file of the repository, its links turned to suit the site
    <!-- help: psd-server -->                what the command prints with --help
    <!-- help: psdctl COMMAND -->            likewise, of each of its subcommands
    <!-- environment -->                     the variables that psd reads
    <!-- errors -->                          the tree of errors and their gRPC codes

is replaced when MkDocs reads the page. Marks of the tests in the pages are taken out.
"""

from __future__ import annotations

import posixpath
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from psd.contract import errors
from psd.contract.environment import VARIABLES

ROOT = Path(__file__).parents[1]
MODULES = {"psd-server": "psd.cli.server", "psd-run": "psd.cli.run", "psdctl": "psd.cli.ctl"}

_DIRECTIVE = re.compile(r"^<!-- (include|help|environment|errors)(?:: (.+?))? -->$", re.MULTILINE)
_COMMENT = re.compile(r"^<!--.*?-->\n", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Called by MkDocs with each page before it is rendered."""

    def replacement(found: re.Match[str]) -> str:
        kind, argument = found.groups()
        if kind == "include":
            return included(argument, page.file.src_uri)
        return {"help": helps, "environment": environment, "errors": error_tree}[kind](*([argument] if argument else []))

    return _COMMENT.sub("", _DIRECTIVE.sub(replacement, markdown))


def included(name: str, page: str) -> str:
    """A Markdown file of the repository, as part of a page: links into docs/ lead there, others become plain text."""
    here = posixpath.dirname(f"docs/{page}")

    def link(found: re.Match[str]) -> str:
        image, text, target = found.groups()
        if re.match(r"[a-z]+:|#", target):
            return found[0]
        path, hash_mark, anchor = target.partition("#")
        path = posixpath.normpath(posixpath.join(posixpath.dirname(name), path))
        path = {"README.md": "docs/index.md", "ARCHITECTURE.md": "docs/design/architecture.md"}.get(path, path)
        path = {"deploy/README.md": "docs/kubernetes.md"}.get(path, path)
        if not (ROOT / path).exists():
            raise FileNotFoundError(f"{name}: links to {target}, which is not there")
        if path.startswith("docs/") and (ROOT / path).is_file():
            return f"{image}[{text}]({posixpath.relpath(path, here)}{hash_mark}{anchor})"
        return f"{text}" if path in text else f"{text} (`{path}`)"

    return _LINK.sub(link, (ROOT / name).read_text())


def help_text(*command: str) -> str:
    """What a command of psd prints with --help."""
    name, *subcommands = command
    arguments = [sys.executable, "-m", MODULES[name], *subcommands, "--help"]
    return subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, check=True).stdout  # noqa: S603


def subcommands(name: str) -> list[str]:
    """Names of a command's subcommands, as its help lists them."""
    listed = help_text(name).partition("\ncommands:\n")[2].partition("\n\n")[0]
    return [line.split()[0] for line in listed.splitlines()]


def helps(argument: str) -> str:
    """The help of a command; of each subcommand under a heading of its own if the argument ends with COMMAND."""
    name, _, which = argument.partition(" ")
    if not which:
        return f"```text\n{help_text(name)}```"
    names = subcommands(name)
    with ThreadPoolExecutor() as pool:
        texts = pool.map(lambda subcommand: help_text(name, subcommand), names)
        return "\n".join(f"## {name} {each}\n\n```text\n{text}```\n" for each, text in zip(names, texts, strict=True))


def environment() -> str:
    """A table of the variables."""
    rows = [f"| `{name}` | {meaning} |" for name, meaning in VARIABLES.items()]
    return "\n".join(["| variable | meaning |", "|---|---|", *rows])


def error_tree() -> str:
    """A table of the errors: class, base, gRPC status, meaning."""
    rows = ["| error | is also | gRPC status | when |", "|---|---|---|---|"]
    for kind in _subclasses(errors.PsdError):
        bases = ", ".join(f"`{base.__name__}`" for base in kind.__bases__ if base is not errors.PsdError)
        meaning = " ".join((kind.__doc__ or "").split())
        rows.append(f"| `{kind.__name__}` | {bases} | `{kind.code}` | {meaning} |")
    return "\n".join(rows)


def _subclasses(kind: type[errors.PsdError]) -> list[type[errors.PsdError]]:
    found = []
    for subclass in kind.__subclasses__():
        if subclass.__module__ == errors.__name__:
            found += [subclass, *_subclasses(subclass)]
    return found
