"""The site of docs/ builds without a warning, has every public name and option, and loads nothing from elsewhere."""

from __future__ import annotations

import html
import re
import subprocess
import sys
from pathlib import Path

import pytest
from loaded_programs import completed
from markdown_blocks import pages
from source_tree import ROOT

import psd_client
from psd.contract.environment import VARIABLES
from psd.contract.errors import PsdError
from psd.contract.facts import CATALOGUE
from psd.contract.keywords import DEFAULTS, ConnectKeywords, FaceKeywords, JobKeywords
from psd.contract.rules import RULES

COMMANDS = {"psd-server": "server", "psd-run": "run", "psdctl": "psdctl"}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the built site."""
    pytest.importorskip("sphinx")
    pytest.importorskip("furo")
    out = tmp_path_factory.mktemp("site")
    options = ["--fail-on-warning", "--keep-going", "--quiet", "-b", "html", "-d", str(out / "doctrees")]
    # A fourth of its time went into searches for garbage: it holds on to what it makes.
    building = "import gc, sys; gc.disable(); from sphinx.cmd.build import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", building, *options, "docs", str(out / "html")]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (built.returncode, built.stdout + built.stderr) == (0, "")
    return out / "html"


def text(page: Path) -> str:
    """The text of a page, without its tags."""
    return html.unescape(re.sub(r"<[^>]+>", "", page.read_text()))


def test_every_page_is_there_and_none_loads_anything_from_elsewhere(site):
    built = list(site.rglob("*.html"))
    sources = [page.relative_to(ROOT / "docs").with_suffix(".html") for page in (ROOT / "docs").rglob("*.md")]
    from_elsewhere = r'<(?:script|img|link|iframe)\b[^>]*\b(?:src|href)="(?:https?:)?//[^"]*"'

    assert [str(page) for page in sources if not (site / page).is_file()] == []
    assert len(sources) > 20
    assert [f"{page.name}: {tag}" for page in built for tag in re.findall(from_elsewhere, page.read_text())] == []
    styles = "".join(path.read_text() for path in site.rglob("*.css"))
    assert re.findall(r"url\([\"']?(?:https?:)?//[^)]*\)|@import[^;]*//", styles) == []


def test_no_mark_of_a_test_and_no_directive_is_left_in_a_page(site):
    marks = ("not run:", "<!-- include", "<!-- help")
    left = [page.name for page in site.rglob("*.html") if any(mark in page.read_text() for mark in marks)]

    assert left == []


def test_the_reference_has_every_public_name(site):
    """Classes, functions and methods of psd_client with an anchor of their own, errors in their table."""
    anchors = anchors_of(site / "reference/psd_client.html")
    errors = text(site / "reference/errors.html")
    names = [name for name in psd_client.__all__ if name != "ConfigError"]
    missing = [
        name
        for name in names
        if (name not in errors if is_error(getattr(psd_client, name)) else f"psd_client.{name}" not in anchors)
    ]

    assert missing == []
    assert methods_without_anchor(psd_client, METHODS_OF, anchors) == []
    assert "ConfigError" in errors


def test_the_reference_has_every_public_name_of_the_face_of_torch(site):
    face = pytest.importorskip("psd_client.torch")
    anchors = anchors_of(site / "reference/torch.html")

    assert [name for name in face.__all__ if f"psd_client.torch.{name}" not in anchors] == []
    assert methods_without_anchor(face, ["DistributedOptimizer"], anchors) == []


@pytest.mark.parametrize(
    ("page", "call", "kind"),
    [
        ("psd_client", "psd_client.connect", ConnectKeywords),
        ("psd_client", "psd_client.ParameterServer.declare", JobKeywords),
        ("torch", "psd_client.torch.distribute", FaceKeywords),
        ("keras", "psd_client.keras.distribute", FaceKeywords),
        ("jax", "psd_client.jax.distribute", JobKeywords),
    ],
)
def test_the_reference_shows_the_keywords_of_a_call_with_types_defaults_and_meanings(site, page, call, kind):
    source = (site / f"reference/{page}.html").read_text()
    found = re.sub(r"<[^>]+>", "", html.unescape(re.split(rf'id="{call}"', source)[1].partition("</dl>\n</dd></dl>")[0]))
    signature, _, meanings = found.partition("Parameters")

    for name, hint in kind.__annotations__.items():
        assert f"{name}: {hint.__forward_arg__} = {DEFAULTS.get(name)!r}," in signature, name
        assert re.search(rf"^(\w+, )*{name}(, \w+)* \u2013 \S", meanings, re.MULTILINE), name


def test_the_reference_has_every_public_name_of_torchrecs_collections(site):
    face = pytest.importorskip("psd_client.torchrec")
    anchors = anchors_of(site / "reference/torchrec.html")

    assert [name for name in face.__all__ if f"psd_client.torchrec.{name}" not in anchors] == []
    assert methods_without_anchor(face, [name for name in face.__all__ if not name.endswith(("Config", "Type"))], anchors) == []


METHODS_OF = [
    "ParameterServer",
    "Reader",
    "DeclaredTable",
    "ReadTable",
    "Vector",
    "Matrix",
    "Batch",
    "BatchAnswer",
    "LocalCluster",
]


def anchors_of(page: Path) -> set[str]:
    return set(re.findall(r'id="([\w.]+)"', page.read_text()))


def methods_without_anchor(module, classes: list[str], anchors: set[str]) -> list[str]:
    """Public methods and properties of some classes that a page lacks, but for those that are "not for programs"."""
    return [
        f"{name}.{method}"
        for name in classes
        for method, value in vars(getattr(module, name)).items()
        if not method.startswith("_") and "not for programs" not in (value.__doc__ or "")
        if f"{module.__name__}.{name}.{method}" not in anchors
    ]


def is_error(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, PsdError)


def test_the_reference_says_what_the_commands_and_the_environment_are(site):
    """Each command's help to the last line; each subcommand's; each variable."""
    for name, module in COMMANDS.items():
        said = completed(["-m", f"psd.cli.{module}", "--help"])
        assert said.returncode == 0
        assert said.stdout.strip() in text(site / f"reference/{name}.html")
    psdctl = text(site / "reference/psdctl.html")
    commands = (
        "status top dashboard workers logs plot follow checkpoint set-lr kick drain checkpoints verify export import "
        "credentials"
    )
    for command in [*commands.split(), "monitoring", "completion"]:
        assert f"usage: psdctl {command}" in psdctl
    assert [name for name in VARIABLES if name not in text(site / "reference/environment.html")] == []
    numbers = text(site / "reference/numbers.html")
    assert [
        fact for rows in CATALOGUE.values() for fact in rows if fact.name not in numbers or fact.metric not in numbers
    ] == []


def test_the_protocol_names_what_every_rule_is_declared_with(site):
    """A worker in another language has flags and the order of scalars from nowhere else before it declares."""
    rows = re.findall(r"<tr.*?</tr>", (site / "protocol.html").read_text(), re.DOTALL)
    words = {cells[0]: cells[1:] for row in rows if (cells := re.sub(r"<[^>]+>", " ", row).split())}

    assert [name for name, rule in RULES.items() if words[name] != [*sorted(rule.flags), *rule.constants, *rule.scalars]] == []


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_files_that_a_page_names_are_there(page):
    """Paths in backticks, such as `psd/rim/calls.py`, and links within the repository."""
    words = page.read_text()
    paths = set(
        re.findall(r"`((?:psd|psd_core|psd_client|clients|proto|tests|benchmarks|examples|deploy|docs)/[\w./-]+)[`:]", words)
    )
    links = {found.partition("#")[0] for found in re.findall(r"\]\((?!\w+:|#)([^)\s]+)\)", words)}
    links |= set(re.findall(r'(?:src|srcset)="([^"]+)"', words))

    assert [path for path in sorted(paths) if not ((ROOT / path).exists() or (ROOT / "clients" / path).exists())] == []
    assert [link for link in sorted(links) if not (page.parent / link).exists()] == []


def test_the_navigation_has_every_page(site):
    """Sphinx warns of a page that no table of contents has; the front page's has them all."""
    front = (site / "index.html").read_text()
    sources = [page.relative_to(ROOT / "docs").with_suffix(".html").as_posix() for page in (ROOT / "docs").rglob("*.md")]

    assert [page for page in sources if page != "index.html" and f'href="{page}"' not in front] == []


def test_the_readme_of_the_tests_has_every_folder():
    words = (ROOT / "tests" / "README.md").read_text()
    folders = [path.name for path in (ROOT / "tests").iterdir() if path.is_dir() and any(path.glob("*.py"))]

    assert [name for name in folders if f"`tests/{name}`" not in words] == []
