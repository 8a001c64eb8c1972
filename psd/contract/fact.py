"""One number that operators see: the row that it has in the catalogue, psd/contract/facts.py.

Must not know which numbers there are.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

Kind = Literal["total", "now", "rate"]


@dataclass(frozen=True)
class Fact:
    """One number.

    Attributes:
        name: its name in every JSON, on the wire, and in code.
        kind: "total": only grows while the shard lives; "now": may shrink; "rate": from the difference of two looks, seconds
            apart.
        help: its meaning, in one sentence.
        source: its place in a shard: a holder of psd/rim/views.py, and the attribute if that is not the name. Empty: psd/watch
            computes it.
        metric: its metric as in a query. A label without a value is for many series: psd_table_rows{table}. Empty: none.
        heading: a heading that says more than the name. rate_of: the number whose growth it is.
        weight: its importance in psdctl top and the dashboard's tables, which omit the least important first; 0: not there.
        table: the table of psdctl status in which it is a column.
    """

    name: str
    kind: Kind
    help: str
    source: str = ""
    metric: str = ""
    heading: str = ""
    rate_of: str = ""
    weight: int = 0
    table: str = ""

    @property
    def unit(self) -> str:
        """`bytes_per_s`, `per_s`, `bytes`, `share`, `s`, or `count`."""
        return next((unit for unit in ("bytes_per_s", "per_s", "bytes", "share", "s") if _ends(self.name, unit)), "count")

    @property
    def title(self) -> str:
        """The heading, as words in lower case."""
        return self.heading or re.sub(r"_(bytes|s|share)$", "", re.sub(r"(_bytes)?_per_s$", "/s", self.name)).replace("_", " ")

    @property
    def metric_name(self) -> str:
        """The metric without its labels."""
        return self.metric.partition("{")[0]

    @property
    def labels(self) -> dict[str, str]:
        """The metric's labels; a label for many series has an empty value."""
        return dict(re.findall(r'(\w+)(?:="(\w+)")?', self.metric.partition("{")[2]))

    def of(self, value: float) -> float:
        """A value from a peer: counts and bytes as an integer; 0 for a value that is not finite, which no shard sends."""
        value = value if math.isfinite(value) else 0.0
        return int(value) if self.unit in ("count", "bytes") else value


def _ends(name: str, unit: str) -> bool:
    return name == unit or name.endswith(f"_{unit}")
