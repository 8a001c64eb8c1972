"""Charts of the tables in docs/performance.md, drawn from the page itself, so that a figure is written once.

    python docs/charts.py [--out FOLDER]

A cell of a table has one number, or two: of two runs ("49, 53"), or the lowest and the highest ("2.5 to 3.6"). A bar ends in
the middle between them, a thin line goes from one to the other, and the cell's own words stand beside it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pictures import WIDTH, Scheme, box, folder_asked_for, line, picture, words, write

PAGE = Path(__file__).parent / "performance.md"

BARS_END = WIDTH - 130
CHARACTER = 7.2
TOP = 66
BAR = 15

Cells = list[str]


@dataclass(frozen=True)
class Bar:
    """A bar: the numbers of its cell, what is written beside it, and what the project asks of itself, if anything."""

    numbers: list[float]
    says: str
    asked: float | None = None


Rows = dict[str, list[Bar | None]]


@dataclass(frozen=True)
class Chart:
    """A table, and what is drawn of it.

    Attributes:
        name: of the files.
        heading: of the section that has the table.
        table: which one of that section, from 0.
        title: the chart's.
        subtitle: conditions, in one line.
        series: what the bars of a row stand for; one without a name needs no legend.
        bars: from a row of the table to the chart's rows, by their names; a bar, or None, for each of the series.
        ascending: shortest first; else in the order of the table.
    """

    name: str
    heading: str
    table: int
    title: str
    subtitle: str
    series: tuple[str, ...]
    bars: Callable[[Cells], Rows]
    ascending: bool = False


def tables(page: str, heading: str) -> list[list[Cells]]:
    """The tables of a section, each as rows of cells, without the head."""
    section = page[page.index(f"\n## {heading}\n") :].split("\n## ")[1]
    found: list[list[Cells]] = []
    before = ""
    for text in section.split("\n"):
        if re.match(r"\|[-|]+\|$", text):
            found.append([])
        elif text.startswith("|") and before.startswith("|"):
            found[-1].append([cell.strip() for cell in text.strip("|").split("|")])
        before = text
    return found


def bar(cell: str, asked: str = "") -> Bar | None:
    """The bar of a cell; None if the cell has no number. What was seen once, or on another day, is in the table alone."""
    says = re.split(", once|;", cell)[0]
    numbers = [float(number) for number in re.findall(r"\d+(?:\.\d+)?", says)]
    limit = re.match(r"\d+(?:\.\d+)?", asked)
    return Bar(numbers, says, float(limit[0]) if limit else None) if numbers else None


def columns(*which: int, asked: tuple[int, ...] = ()) -> Callable[[Cells], Rows]:
    """A row's bars are its cells of these columns; those of `asked` say what is asked of them."""

    def bars(row: Cells) -> Rows:
        limits = [row[column] for column in asked] or [""] * len(which)
        found = [bar(row[column], limit) for column, limit in zip(which, limits, strict=True)]
        return {row[0]: found} if any(found) else {}

    return bars


def of_both_forms(row: Cells) -> Rows:
    """Bars of a row of "A sparse model over slow links": a cell has the number with a table, the dense one, and their ratio."""
    ways = ("tcp, W = 1", "tcp, W = 4", "grpc, W = 1", "grpc, W = 4")
    pairs = [cell.partition(":")[0].split(", ") for cell in row[1:]]
    return {f"{row[0]}, {way}": [Bar([float(each)], each) for each in pair] for way, pair in zip(ways, pairs, strict=True)}


DENSE = "Push, update by SGD, pull: 25.6 M float32, one server, two cores."

CHARTS = (
    Chart(
        "step-beside-others",
        "The dense step",
        0,
        "A step of two workers, in ms: shorter is better",
        DENSE + " Each system's two runs in turns with the others.",
        ("",),
        lambda row: {} if re.search("raw|streams", row[0]) else columns(2)(row),
        ascending=True,
    ),
    Chart("dense-step", "The dense step", 0, "The dense step, in ms", DENSE, ("W = 1", "W = 2"), columns(1, 2)),
    Chart(
        "dense-ratios",
        "The dense step",
        1,
        "The dense step: time in proportion to a reference's; red: what the project asks of itself",
        "Both in the same run. W is the number of workers.",
        ("",),
        lambda row: {} if "goodput" in row[0] else columns(1, asked=(2,))(row),
    ),
    Chart("small-calls", "Small calls", 0, "A push_pull of 1 KB, in ms", "Medians of 2,500 calls.", ("",), columns(1)),
    Chart(
        "call",
        "Small calls",
        1,
        "Where the time of a push_pull of 1 KB over tcp goes, in microseconds",
        "In the order of time.",
        ("10 % quantile", "median"),
        columns(1, 2),
    ),
    Chart(
        "start",
        "The start of a large job",
        0,
        "declare of 1 GB, in seconds; red: what the project asks of itself",
        "The best of two starts, one shard and two, one tensor and 300: the lowest and the highest.",
        ("the first worker", "a later one"),
        columns(1, 3, asked=(5, 5)),
    ),
    Chart(
        "sparse-step",
        "A step on a sparse table",
        0,
        "A step on a sparse table, in ms; red: what the project asks of itself",
        "1 M rows of 64 numbers, Adagrad, 10,000 ids a step by Zipf's law: the lowest and the highest median.",
        ("one worker", "two workers"),
        columns(1, 3, asked=(2, 4)),
    ),
    Chart(
        "slow-links",
        "A sparse model over slow links",
        0,
        "A sparse model, in steps a second: longer is better",
        "54,877 weights in a table, and in a dense tensor; two shards, each process a host of its own.",
        ("in a table", "dense"),
        of_both_forms,
    ),
)


def middle(of: Bar) -> float:
    """End of the bar."""
    return (min(of.numbers) + max(of.numbers)) / 2


def drawn(chart: Chart, page: str, scheme: Scheme) -> str:
    """The chart as an SVG."""
    found = [chart.bars(row) for row in tables(page, chart.heading)[chart.table]]
    rows = {name.replace("`", ""): bars for row in found for name, bars in row.items()}
    if chart.ascending:
        rows = dict(sorted(rows.items(), key=lambda row: middle(row[1][-1])))
    begin = max(150, 30 + CHARACTER * max(len(name) for name in rows))
    scale = (BARS_END - begin) / max(max(each.numbers) for bars in rows.values() for each in bars if each)
    parts = [words(24, 28, chart.title, "title"), words(24, 47, chart.subtitle, "faint")]
    step = BAR * len(chart.series) + 9
    height = TOP + step * len(rows) + 10
    for number, name in enumerate(chart.series):
        if name:
            x = begin + 135 * number
            parts += [box(x, TOP, 11, 11, scheme.ours[number]), words(x + 17, TOP + 10, name, "faint")]
    top = TOP + (24 if chart.series[0] else 0)
    for row, (name, bars) in enumerate(rows.items()):
        y = top + step * row
        ours = name.startswith("psd") or not any(each.startswith("psd") for each in rows)
        parts.append(words(begin - 12, y + (step - 9) / 2 + 4.5, name, "ours" if name.startswith("psd") else "", "end"))
        for number, each in enumerate(bars):
            colours = scheme.ours if ours else scheme.others
            if each:
                parts += _bar(each, begin, y + BAR * number, scale, colours[number], scheme)
    return picture(scheme, height + top - TOP, _in_words(chart, rows), parts)


def _bar(bar: Bar, begin: float, y: float, scale: float, colour: str, scheme: Scheme) -> list[str]:
    low, end, high = (begin + scale * number for number in (min(bar.numbers), middle(bar), max(bar.numbers)))
    parts = [box(begin, y, max(end - begin, 1), BAR - 2, colour)]
    if high > low:
        parts.append(line(low, y + BAR / 2 - 1, high, y + BAR / 2 - 1, scheme.text, 1.5))
    beside = max(high, end)
    if bar.asked is not None:
        at = begin + scale * bar.asked
        parts.append(line(at, y - 2, at, y + BAR, scheme.bad, 2))
        if beside - 7 < at < beside + 14 + CHARACTER * len(bar.says):
            beside = at
    return [*parts, words(beside + 7, y + BAR - 4, bar.says, "faint")]


def _in_words(chart: Chart, rows: Rows) -> str:
    """Words for a reader who does not see the chart."""
    said = "; ".join(
        f"{name.replace('`', '')} {' and '.join(each.says for each in bars if each)}" for name, bars in rows.items()
    )
    return f"{chart.title}. {said}"


def main() -> None:
    """Draw all charts."""
    folder = folder_asked_for(__doc__)
    page = PAGE.read_text()
    for chart in CHARTS:
        write(folder, chart.name, lambda scheme, chart=chart: drawn(chart, page, scheme))


if __name__ == "__main__":
    main()
