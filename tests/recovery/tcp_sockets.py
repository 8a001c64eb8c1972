"""TCP sockets of a process, as Linux shows them."""

from __future__ import annotations

from pathlib import Path

_ESTABLISHED = "01"


def connected_sockets(pid: int) -> dict[str, int]:
    """Connected TCP sockets around a process: their names, as descriptors have them, and their peers' ports. On one machine
    peers live."""
    tables = [Path(f"/proc/{pid}/net/{name}") for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables if table.exists() for line in table.read_text().splitlines()[1:]]
    return {f"socket:[{row[9]}]": int(row[2].rpartition(":")[2], 16) for row in rows if row[3] == _ESTABLISHED}
