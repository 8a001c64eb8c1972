"""Jobs of psd-run without a process, and what its policy does and says."""

from psd.cli.job.actions import Action, Name, Say
from psd.cli.job.policy import JobPolicy

SHARDS = [Name("shard", 0), Name("shard", 1)]
WORKERS = [Name("worker", 0), Name("worker", 1)]


def starting(
    restarts_max: int = 0,
    shard_restarts_max: int = 10,
    on_worker_failure: str = "wait",
    *,
    has_checkpoints: bool = False,
) -> JobPolicy:
    """A job of two shards and two workers, before anything is started."""
    return JobPolicy(
        state_dirs=["/state/shard-0", "/state/shard-1"],
        workers=2,
        restarts_max=restarts_max,
        shard_restarts_max=shard_restarts_max,
        grace_s=10,
        on_worker_failure=on_worker_failure,
        has_checkpoints=has_checkpoints,
    )


def running(restarts_max: int = 0, shard_restarts_max: int = 10, on_worker_failure: str = "wait", **options: bool) -> JobPolicy:
    """The same, all of whose processes run."""
    policy = starting(restarts_max, shard_restarts_max, on_worker_failure, **options)
    policy.on_start(0)
    for shard in SHARDS:
        policy.on_ready(shard, 0.5)
    return policy


def deeds(actions: list[Action]) -> list[Action]:
    """Without the talk."""
    return [action for action in actions if not isinstance(action, Say)]


def said(actions: list[Action]) -> str:
    """Only the talk."""
    return "\n".join(action.text for action in actions if isinstance(action, Say))
