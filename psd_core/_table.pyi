from typing import Any, Final

RULES_CHECKSUM: Final[int]
REMOVED_MAX: Final[int]

# Arrays are any buffers; each call checks them.
def mixed(ids: Any, out: Any) -> None: ...

class Partition:
    size: int
    regions: list[tuple[int, int]]
    is_moving: bool
    def __init__(
        self,
        *,
        dim: int,
        width: int,
        rows_max: int,
        push_max: int,
        notes: int,
        seed: int,
        rule: int,
        rowwise: bool,
        init: int,
        a: float,
        b: float,
        evicts: bool,
        flags: tuple[bool, ...],
        slot_at: tuple[int, ...],
        slot_start: tuple[float, ...],
        on_store: Any = None,
    ) -> None: ...
    def attach(self, mapping: Any, fresh: bool) -> str | None: ...
    def lack(self, n: int) -> tuple[int, int, int] | None: ...
    def set_backed(self, region: int, nbytes: int) -> None: ...
    def clear(self, start: int, nbytes: int) -> None: ...
    def behind(self) -> tuple[int, int]: ...
    def must_move(self, n: int) -> bool: ...
    def move(self, n: int) -> None: ...
    def read(self, ids: Any, out: Any, found: Any, whole: bool, clock: int) -> None: ...
    def push(
        self,
        ids: Any,
        values: Any,
        *,
        scalars: tuple[float, ...],
        scale: float,
        clock: int,
        notes: Any,
        distinct: bool,
        whole: bool,
    ) -> int: ...
    def walk(self, tag: int, heads: Any, rows: Any) -> tuple[int, int]: ...
    def expire(self, tag: int, clock: int, age: int) -> int: ...
    def discard(self, ids: Any) -> int: ...
    def notes(self, out: Any) -> None: ...
    def places(self) -> dict[str, list[int]]: ...
    def counters(self) -> dict[str, int]: ...
