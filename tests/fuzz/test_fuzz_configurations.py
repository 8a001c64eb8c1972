"""Two lives and more of one state directory with different flags of psd-server, clocks far apart, counters near their edges.

Whatever the flags are: a shard goes on with what has counted, each gradient and batch once, or refuses to, which changes
nothing: with the flags of the life before it goes on.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from fuzzing import fuzzed
from hypothesis import given
from hypothesis import strategies as st
from job_lives import JobLives, config_of

from psd.cli import server
from psd.contract.environment import memory_directory

FEW = ["1", "2", "3", "5", "17"]


def _limit(*more: str) -> list[str]:
    return [*FEW, *more]


FLAGS: dict[str, list[str]] = {
    "--lease": ["0.1", "0.5", "10", "86400"],
    "--on-worker-failure": ["wait", "continue", "end"],
    "--run-id": ["", "mine", "yours"],
    "--grace": ["0", "3600"],
    "--advertise": ["example.org:1"],
    "--bulk-port": ["off", "0", "1"],
    "--health-port": ["0"],
    "--metrics-port": ["0"],
    "--listen": ["127.0.0.1:0", "[::1]:0"],
    "--checkpoint-secs": ["0", "1", "1000"],
    "--checkpoint-steps": ["0", "1", "2", "7"],
    "--checkpoint-keep": ["1", "1000000"],
    "--max-workers": _limit("100", "10000"),
    "--max-tensors": _limit("10000000"),
    "--max-elements": _limit(str(1 << 48)),
    "--max-message-bytes": [str(5 << 20), str(1 << 30)],
    "--max-name-bytes": _limit("4096"),
    "--max-reduced-numbers": _limit("16384"),
    "--max-tables": _limit("10000"),
    "--max-table-dim": _limit("65536"),
    "--max-table-bytes": _limit("4096", "1000000", str(1 << 48)),
    "--max-table-rows": _limit(str(1 << 31)),
    "--max-push-ids": _limit(str(1 << 20)),
    "--max-push-bytes": _limit("100", str(1 << 40)),
    "--max-vectors": _limit(str(1 << 20)),
    "--max-vector-bytes": _limit("64", str(1 << 48)),
    "--max-batch-operations": _limit(str(1 << 20)),
    "--max-batch-bytes": [str(1 << 20), str(1 << 40)],
    "--max-reads": _limit("10000"),
    "--max-readers": _limit("100000"),
    "--keep-versions": _limit("1000"),
    "--max-calls": _limit("1000000"),
    "--max-connections": _limit("1000000"),
    "--max-streams": ["8", "1000000"],
    "--log-level": ["debug", "error"],
}
SWITCHES = ["--exit-when-done", "--exit-on-eof", "--heed-launcher", "--insecure", "--log-json", "--never-armed"]
ELSEWHERE = {
    *("--shard", "--state-dir", "--checkpoint-dir", "--from-checkpoint", "--parameters-only"),  # what the lives have in common
    *("--rule", "--rule-dir", "--tls-cert", "--tls-key", "--tls-client-ca", "--token-file"),  # name files; test_fuzz_files.py
    *("--help", "--version", "-h"),
}

flags = st.lists(
    st.one_of(
        *(st.sampled_from(values).map(lambda value, flag=flag: [flag, value]) for flag, values in FLAGS.items()),
        *(st.just([switch]) for switch in SWITCHES),
    ),
    max_size=4,
).map(lambda found: [word for words in found for word in words])

STEPS = [0, 0, (1 << 31) - 3, (1 << 32) - 3, (1 << 53) - 3, 1 << 55]
"""At which a job begins."""

LEAPS = [1, 2, 200, 1000]
"""How far clocks leap; 1024 is the limit."""

deeds = st.lists(
    st.one_of(
        *[st.tuples(st.just("step"), st.integers(0, 2), st.sampled_from([1, 1, 1, 40]))] * 4,
        *[st.tuples(st.sampled_from(["again", "batch", "batch", "batch_again", "rejoin", "cut", "cut"]), st.integers(0, 2))]
        * 3,
        st.tuples(st.just("leap"), st.integers(0, 2), st.sampled_from(LEAPS)),
        st.tuples(st.just("batches"), st.integers(0, 2), st.integers(1, 12)),
        st.tuples(st.just("late"), st.integers(0, 2), st.integers(1, 12)),
        st.tuples(st.just("rest"), st.sampled_from([0.01, 1.0, 1e6])),
    ),
    max_size=12,
)

ends = st.sampled_from(["killed", "ended", "killed", "ended", "lost", "damaged", "killed and damaged"])

lives = st.lists(st.tuples(flags, deeds, ends, st.floats(0, 1, exclude_max=True)), min_size=2, max_size=6)
"""Of each: its flags, what happens in it, how it ends, and where it is damaged then."""

table_options = st.sampled_from(
    [{}, {"expire_steps": 1 << 30}, {"max_rows": 1 << 20}, {"updates": "catch_up"}],
)


def test_every_flag_is_drawn() -> None:
    known = {word for action in server.parser()._actions for word in action.option_strings}

    assert known == {*FLAGS, *SWITCHES, *ELSEWHERE}


@fuzzed
@given(lives, st.sampled_from(["sync", "exact", "async", "ssp:2"]), st.integers(1, 3), table_options, st.sampled_from(STEPS))
def test_lives_of_a_state_directory(lives: Any, mode: str, workers: int, table: dict[str, Any], step: int) -> None:
    """A worker's last gradient and batch come again at the beginning of each life, as they may after any."""
    with tempfile.TemporaryDirectory(prefix="psd-fuzz-", dir=memory_directory()) as directory:
        job = JobLives(Path(directory), mode, workers, table, step)
        try:
            _live(job, directory, workers, lives)
        finally:
            job.close()


def _live(job: JobLives, directory: str, workers: int, lives: Any) -> None:
    for number, (argv, done, end, where) in enumerate(lives):
        config = config_of(argv, directory)
        if config is None:
            continue
        if not job.has_begun:
            if not job.begin(config):
                return
        else:
            job.go_on(config)
            job.check()
            for rank in range(workers):
                job.again(rank)
                job.batch_again(rank)
        for name, *arguments in done:
            if name != "rest":
                arguments[0] %= workers
            getattr(job, name)(*arguments)
            job.store()
        for rank in range(workers):
            job.again(rank)
            job.late(rank, 7)
            job.batch_again(rank)
        job.check()
        if number == len(lives) - 1:
            return
        job.end(is_killed=end.startswith("killed"))
        if end == "lost":
            job.lose()
        elif end == "damaged":
            job.damage(where)
        elif end == "killed and damaged":
            job.damage_killed(where)
            return
