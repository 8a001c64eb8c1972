from collections.abc import Sequence
from typing import Any

UNSENT: int
PENDING: int
TAKEN: int
REFUSED: int
FOREIGN: int
BROKEN: int

class WorkerSteps:
    def __init__(
        self, shards: int, /, *, versions: Any, sends_versions: bool, scalars: int, looked_at: Sequence[Any]
    ) -> None: ...
    def lay_out(
        self, shard: int, blocks: Any, head_bytes: int, place: int, gradients: list[Any], parameters: list[Any], /
    ) -> tuple[int, int]: ...
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
