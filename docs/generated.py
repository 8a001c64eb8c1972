"""Parts of the site that are taken from elsewhere in the repository, so that nothing is written twice. A line of a page such as

    <!-- include: README.md -->              a Markdown file of the repository, its links turned to suit the site
    <!-- help: psd-server -->                what the command prints with --help
    <!-- help: psdctl COMMAND -->            likewise, of each of its subcommands
    <!-- help: psd-server --relay-of=A -->   likewise, with this option
    <!-- environment -->                     the variables that psd reads
    <!-- errors -->                          the tree of errors and their gRPC codes
    <!-- rules -->                           the names of what a group of each rule is declared with, and of its scalars
    <!-- numbers -->                         the numbers that operators see, by what they are of

is replaced when Sphinx reads the page. Marks of the tests in the pages are taken out. A <picture> for two colour schemes
becomes two images, of which the theme shows one.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import posixpath
import re
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer

from psd.contract import errors
from psd.contract.environment import VARIABLES
from psd.contract.facts import CATALOGUE
from psd.contract.rules import RULES

ROOT = Path(__file__).parents[1]
MODULES = {"psd-server": "psd.cli.server", "psd-run": "psd.cli.run", "psdctl": "psd.cli.psdctl"}

PAGES = {
    "README.md": "docs/index.md",
    "ARCHITECTURE.md": "docs/design/architecture.md",
    "deploy/README.md": "docs/kubernetes.md",
}
"""Files of the repository that are pages of the site."""

_DIRECTIVE = re.compile(r"^<!-- (include|help|environment|errors|numbers|rules)(?:: (.+?))? -->$", re.MULTILINE)
_COMMENT = re.compile(r"^<!--.*?-->\n", re.MULTILINE | re.DOTALL)
_properties: dict[str, list[str]] = {}

_TITLE = re.compile(r'^```(\w+) title="(.+)"$', re.MULTILINE)
_PICTURE = re.compile(r'<picture>\n  <source [^>]*srcset="(.+?)">\n  <img alt="(.+?)" src="(.+?)">\n</picture>')
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect this module to Sphinx, which calls it because of conf.py."""
    app.connect("source-read", lambda _app, name, source: source.__setitem__(0, replaced(source[0], f"docs/{name}.md")))
    # Napoleon (priority 500) takes the sections of docstrings apart. In a property's it finds a type: the words up to a colon.
    app.connect("autodoc-process-docstring", _as_restructured_text, priority=400)
    app.connect("autodoc-process-docstring", _without_a_type, priority=600)
    for module, call in (
        ("psd_client.connecting", "connect"),
        ("psd_client.torch", "distribute"),
        ("psd_client.keras", "distribute"),
    ):
        analyzer = ModuleAnalyzer.for_module(module)
        analyzer.analyze()
        analyzer.overloads.pop(call)  # overloads are for type checkers: they do not list all keywords
    return {"parallel_read_safe": True}


def _as_restructured_text(_app: Sphinx, what: str, name: str, _thing: Any, _options: Any, lines: list[str]) -> None:
    """Turn a docstring's Markdown, such as `code` and names that end with an underscore, into reStructuredText."""
    lines[:] = [re.sub(r"(?<=\w)_(?!\w)", r"\\_", re.sub(r"(?<!`)`([^`]+)`(?!`)", r"``\1``", line)) for line in lines]
    if what == "property":
        _properties[name] = list(lines)


def _without_a_type(_app: Sphinx, what: str, name: str, _thing: Any, _options: Any, lines: list[str]) -> None:
    if what == "property":
        lines[:] = _properties.pop(name)


def replaced(markdown: str, page: str) -> str:
    """The text of a page, with its marks replaced, for Sphinx."""

    def replacement(found: re.Match[str]) -> str:
        kind, argument = found.groups()
        if kind == "include":
            return linked((ROOT / argument).read_text(), argument, page)
        made = {"help": helps, "environment": environment, "errors": error_tree, "numbers": numbers, "rules": rules}
        return made[kind](*([argument] if argument else []))

    text = _COMMENT.sub("", _DIRECTIVE.sub(replacement, linked(markdown, page, page)))
    return _TITLE.sub(r"```{code-block} \1\n:caption: \2\n", text)


def linked(markdown: str, origin: str, page: str) -> str:
    """The text of one file as part of a page: links to other pages lead there, links out of docs/ become plain text.

    Raises:
        FileNotFoundError: a link leads to what is not there.
    """

    def link(found: re.Match[str]) -> str:
        image, text, target = found.groups()
        if re.match(r"[a-z]+:|#", target):
            return found[0]
        path, hash_mark, anchor = target.partition("#")
        path = posixpath.normpath(posixpath.join(posixpath.dirname(origin), path))
        path = PAGES.get(path, path)
        if not (ROOT / path).exists():
            raise FileNotFoundError(f"{origin}: links to {target}, which is not there")
        if path.startswith("docs/"):
            return f"{image}[{text}]({posixpath.relpath(path, posixpath.dirname(page))}{hash_mark}{anchor})"
        return text if path in text or path.rpartition("/")[2] == text else f"{text} (`{path}`)"

    return _LINK.sub(link, _PICTURE.sub(r"![\2](\3){.only-light}\n![\2](\1){.only-dark}", markdown))


def help_text(name: str, *arguments: str) -> str:
    """The output of a command with --help."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        importlib.import_module(MODULES[name]).main([*arguments, "--help"])
    return said.getvalue()


def subcommands(name: str) -> list[str]:
    """Names of a command's subcommands, as its help lists them."""
    lists = help_text(name).partition("--version")[2].partition(f"\n{name} COMMAND")[0]
    return re.findall(r"^  (\S+)  ", lists.partition("\n")[2], re.MULTILINE)


def helps(argument: str) -> str:
    """The help of a command, perhaps with an option; with COMMAND of each subcommand under its own heading."""
    name, *options = argument.split()
    if options != ["COMMAND"]:
        return f"```text\n{help_text(name, *options)}```"
    return "\n".join(f"## {name} {each}\n\n```text\n{help_text(name, each)}```\n" for each in subcommands(name))


def environment() -> str:
    """A table of the variables."""
    rows = [f"| `{name}` | {meaning} |" for name, meaning in VARIABLES.items()]
    return "\n".join(["| variable | meaning |", "|---|---|", *rows])


def numbers() -> str:
    """A table of the numbers of each kind of thing: name, heading, kind, meaning, metric."""
    found = []
    for of, rows in CATALOGUE.items():
        found += [f"## Of a {of}", "", "| number | heading | kind | what it is | metric |", "|---|---|---|---|---|"]
        for fact in rows:
            metric = f"`{fact.metric}`" if fact.metric else ""
            found.append(f"| `{fact.name}` | {fact.title} | {fact.kind} | {fact.help} | {metric} |")
        found.append("")
    return "\n".join(found)


def error_tree() -> str:
    """A table of the errors: class, base, gRPC status, meaning."""
    rows = ["| error | is also | gRPC status | when |", "|---|---|---|---|"]
    for kind in _subclasses(errors.PsdError):
        bases = ", ".join(f"`{base.__name__}`" for base in kind.__bases__ if base is not errors.PsdError)
        meaning = " ".join((kind.__doc__ or "").split())
        rows.append(f"| `{kind.__name__}` | {bases} | `{kind.code}` | {meaning} |")
    return "\n".join(rows)


def rules() -> str:
    """A table of the rules: flags, constants, and scalars in their order."""
    rows = ["| rule | flags | constants | scalars, in order |", "|---|---|---|---|"]
    for name, info in RULES.items():
        names = [" ".join(f"`{each}`" for each in column) for column in (sorted(info.flags), info.constants, info.scalars)]
        rows.append(f"| `{name}` | {' | '.join(names)} |")
    return "\n".join(rows)


def _subclasses(kind: type[errors.PsdError]) -> list[type[errors.PsdError]]:
    found = []
    for subclass in kind.__subclasses__():
        if subclass.__module__ == errors.__name__:
            found += [subclass, *_subclasses(subclass)]
    return found
