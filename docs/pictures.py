"""Two colour schemes, and the few SVG elements that the pictures of the README and of docs/ are made of.

charts.py, timelines.py and recording.py draw with it. It knows nothing of psd, and needs nothing but Python: an SVG is text.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

IMAGES = Path(__file__).parent / "images"
WIDTH = 800


@dataclass(frozen=True)
class Scheme:
    """Colours of a picture: of what lies behind it, of words, of what is psd's and what is somebody else's."""

    suffix: str
    ground: str
    frame: str
    text: str
    faint: str
    grid: str
    ours: tuple[str, str]
    others: tuple[str, str]
    good: str
    bad: str


LIGHT = Scheme(
    suffix="",
    ground="#ffffff",
    frame="#d0d7de",
    text="#1f2328",
    faint="#59636e",
    grid="#e6eaee",
    ours=("#2563c9", "#8fb4ee"),
    others=("#8a96a3", "#c9d1d9"),
    good="#1a7f37",
    bad="#cf222e",
)
DARK = Scheme(
    suffix="-dark",
    ground="#0d1117",
    frame="#30363d",
    text="#e6edf3",
    faint="#9198a1",
    grid="#232a32",
    ours=("#5b9cff", "#2f5796"),
    others=("#7d8894", "#46505a"),
    good="#3fb950",
    bad="#ff6b63",
)


def words(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    """A line of text; `kind` is a class of the style sheet."""
    return f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>'


def box(x: float, y: float, width: float, height: float, fill: str, more: str = "") -> str:
    """A filled rectangle with slightly rounded corners."""
    return f'<rect x="{x:g}" y="{y:g}" width="{width:.1f}" height="{height:g}" rx="2" fill="{fill}" {more}/>'


def line(x: float, y: float, to_x: float, to_y: float, colour: str, width: float = 1) -> str:
    """A straight line."""
    return f'<path d="M{x:.1f} {y:.1f}L{to_x:.1f} {to_y:.1f}" stroke="{colour}" stroke-width="{width:g}"/>'


def picture(scheme: Scheme, height: float, label: str, parts: list[str], style: str = "") -> str:
    """A whole SVG file: the parts on a framed ground. `label` says in words what is to be seen."""
    font = "13px system-ui,-apple-system,'Segoe UI',sans-serif"
    sheet = f"text{{font:{font};fill:{scheme.text}}}.title{{font-weight:600;font-size:14px}}.ours{{font-weight:600}}"
    sheet += f".faint{{fill:{scheme.faint};font-size:12px}}"
    quoted = escape(label, {'"': "&quot;"})
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" height="{height:g}" '
            f'role="img" aria-label="{quoted}">',
            f"<style>{sheet}{style}</style>",
            f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1:g}" rx="8" fill="{scheme.ground}" '
            f'stroke="{scheme.frame}"/>',
            *parts,
            "</svg>\n",
        ]
    )


def write(folder: Path, name: str, draw: Callable[[Scheme], str]) -> None:
    """Write NAME.svg and NAME-dark.svg."""
    for scheme in (LIGHT, DARK):
        (folder / f"{name}{scheme.suffix}.svg").write_text(draw(scheme))


def folder_asked_for(doc: str | None) -> Path:
    """The folder that the command line names, docs/images unless it does."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=IMAGES, help="folder for the pictures (default: docs/images)")
    folder: Path = parser.parse_args().out
    return folder
