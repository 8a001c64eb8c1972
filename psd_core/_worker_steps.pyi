from collections.abc import Mapping, Sequence
from typing import Any

UNSENT: int
PENDING: int
TAKEN: int
REFUSED: int
FOREIGN: int
BROKEN: int
ROWS_BYTES_MAX: int

class WorkerSteps:
    def __init__(
        self,
        shards: int,
        /,
        *,
        versions: Any,
        sends_versions: bool,
        scalars: int,
        looked_at: Sequence[Any],
        looks_out: bool = False,
    ) -> None: ...
    @property
    def doubt(self) -> int: ...
    def lay_out(
        self,
        shard: int,
        blocks: Any,
        head_bytes: int,
        place: int,
        gradients: list[Any],
        parameters: list[Any],
        tables: int = 0,
        /,
    ) -> tuple[int, int]: ...
    def give_rows(
        self, shard: int, pushed: Mapping[int, tuple[Any, Any, int]], pulled: Mapping[int, tuple[Any, Any, int]], /
    ) -> None: ...
    def arm(self, shard: int, fd: int, epoch: int, /) -> None: ...
    def run(
        self,
        session: int,
        clock: int,
        since: int,
        weight: float,
        scalars: Sequence[Sequence[float]],
        present: list[bytes] | None,
        /,
    ) -> bool | None: ...
    def advance(self, shard: int, /) -> bool: ...
    def state(self, shard: int, /) -> int: ...
    def error(self, shard: int, /) -> int: ...
    def done(self, shard: int, /) -> tuple[int, int, int]: ...
    def unread(self, shard: int, /) -> bytes: ...
