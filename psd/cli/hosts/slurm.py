"""psd-run --on slurm: srun starts a psd-run for each of the job's tasks, and they meet as with --nnodes.

    srun --nodes 2 --ntasks 4 psd-run --on slurm --shards 2 train.py      4 workers; ranks are SLURM_PROCID

Task 0 leads, on the first host of the step; the port follows from the job's number. SLURM places tasks, restarts nothing, and
ends all tasks together; a job that it queues again begins with its newest checkpoint, if psd-run has a --checkpoint-dir.

Reads the task's environment and asks `scontrol` for an address; starts nothing.
"""

from __future__ import annotations

import argparse
import subprocess
from collections.abc import Mapping

from psd.cli.words.arguments import refuse_given
from psd.contract.config import ConfigError, join_address

PORT_FIRST, PORTS = 20_000, 10_000
"""Ports for the meeting, by the job's number: below those that systems give to clients, and rarely the same for two jobs."""

_ASK_S = 20.0


def fill_in(args: argparse.Namespace, environ: Mapping[str, str]) -> None:
    """Set the options that SLURM knows: number of nodes, number of this node, rendezvous, and the workers, if they are not
    given.

    Raises:
        ConfigError: this is not a task of srun, or scontrol does not answer.
    """
    refuse_given(args, dict.fromkeys(("nnodes", "node_rank", "hosts"), "not with --on slurm, where srun's tasks are the nodes"))
    try:
        tasks, task, job = (int(environ[name]) for name in ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_JOB_ID"))
        hosts = environ["SLURM_STEP_NODELIST"]
    except (KeyError, ValueError):
        raise ConfigError("--on slurm: this is no task of srun; write srun psd-run --on slurm ...") from None
    if args.workers is None:
        args.workers = tasks
    if tasks == 1:
        return
    args.nnodes, args.node_rank = tasks, task
    if not args.rendezvous:
        args.rendezvous = join_address(_address(hosts), PORT_FIRST + job % PORTS)


def _address(hosts: str) -> str:
    """Address of the first host in a list such as node[1-4]: the one that SLURM's own daemons use."""
    first = _ask("show", "hostnames", hosts).split("\n", 1)[0]
    words = dict(word.split("=", 1) for word in _ask("--oneliner", "show", "node", first).split() if "=" in word)
    return words.get("NodeAddr", first)


def _ask(*question: str) -> str:
    try:
        done = subprocess.run(["scontrol", *question], capture_output=True, text=True, timeout=_ASK_S, check=True)  # noqa: S603, S607
    except subprocess.CalledProcessError as error:
        raise ConfigError(f"--on slurm: scontrol {' '.join(question)}: {error.stderr.strip()}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"--on slurm: cannot ask scontrol: {error}") from error
    return done.stdout
