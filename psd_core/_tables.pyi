import threading

from psd_core.table import TableStore

class TablesCore:
    lock: threading.Lock
    version: int
    unit: int
    is_open: bool
    has_tickets: bool
    def __init__(
        self,
        stores: list[tuple[TableStore, list[int], int]],
        workers: int,
        has_rounds: bool,
        shards: int,
        shard: int,
        ids_max: int,
    ) -> None: ...
    @property
    def updates(self) -> int: ...
    @property
    def times(self) -> tuple[float | None, list[int], float]: ...
    @property
    def ages(self) -> tuple[list[int], int]: ...
    def clock(self, table: int) -> int: ...
    def set_clock(self, table: int, clock: int) -> None: ...
    def close(self) -> None: ...

class TablesPlace:
    version: int
    def lie_in(self, core: TablesCore) -> None: ...
