"""A job whose shards answer what a test has written, at a time that the test sets."""

from __future__ import annotations

from psd.v1 import control_pb2 as pb
from psd.watch.merging import Answer
from psd.watch.sampler import Sampler

LIVE, EXPIRED, FINISHED = pb.WORKER_STATE_LIVE, pb.WORKER_STATE_EXPIRED, pb.WORKER_STATE_FINISHED


class ScriptedJob:
    """Shards whose answers the test writes, and the time."""

    def __init__(self, shards=2, workers=2):
        self.seconds = 0.0
        self.replies = [
            pb.StatusReply(
                shard_index=index,
                shard_count=shards,
                state=pb.SHARD_STATE_SERVING,
                life=pb.LIFE_CYCLE_SERVING,
                run_id="mnist-1",
                incarnation=7,
                consistency="sync",
                world_size=workers,
                numbers={"blocks": 2, "tensors": 4},
                checkpoint_dir="/data",
                workers=[pb.WorkerStatus(rank=rank, state=LIVE, host="a", pid=10 + rank) for rank in range(workers)],
                calls=[pb.CallStatus(call="push_pull")],
            )
            for index in range(shards)
        ]
        self.is_silent = [False] * shards
        self.asked: list[int] = []
        self.curve_replies: list[pb.CurvesReply] = []
        self.sampler = Sampler(self, lambda: self.seconds, lambda: 1e9 + self.seconds)

    def ask(self, timeout_s):
        del timeout_s
        return [
            Answer(f"host:{7000 + index}", None, "UNAVAILABLE", "failed to connect to all addresses: refused")
            if silent
            else Answer(f"host:{7000 + index}", reply)
            for index, (reply, silent) in enumerate(zip(self.replies, self.is_silent, strict=True))
        ]

    def curves(self, after, timeout_s):
        del timeout_s
        self.asked.append(after)
        return self.curve_replies.pop(0) if self.curve_replies else None

    def train(self, seconds, steps_per_s=10, slow=None, awaited_share=0.0, batch_size=1):
        """A look each second, with steps in between; the last look."""
        for _ in range(seconds):
            self.seconds += 1
            for reply in self.replies:
                for name, grows_by in (("version_max", 1), ("updates", 2), ("received_bytes", 1000)):
                    reply.numbers[name] += grows_by * steps_per_s
                reply.numbers["cpu_s"] += 0.5
                reply.calls[0].count += 2 * steps_per_s
                reply.calls[0].seconds += 0.01 * 2 * steps_per_s
                for worker in reply.workers:
                    worker.clock += steps_per_s
                    worker.numbers["samples"] += batch_size * steps_per_s
                    worker.numbers["awaited_s"] += awaited_share if worker.rank == slow else 0
            self.sampler.look()
        return self.sampler.now

    def look(self):
        self.seconds += 1
        return self.sampler.look()

    @property
    def told(self):
        return [event.text for event in self.sampler.history.events]


def logged(incarnation: int, latest: int, steps: list[int], values: list[float], *, more: bool = False) -> pb.CurvesReply:
    """An answer with points of worker 1's loss."""
    curve = pb.Curve(rank=1, name="loss", steps=steps, values=values, ago_s=[0.5] * len(steps))
    return pb.CurvesReply(incarnation=incarnation, latest=latest, more=more, curves=[curve] if steps else [])
