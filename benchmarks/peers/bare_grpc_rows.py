"""Python gRPC with the bytes of a step on a sparse table, prepared beforehand, and no rows: the cost of gRPC itself.

A server, or one of its clients.

One unary call a step: ids and numbers there, and as many rows' numbers back. The processes have the malloc settings of psd's.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import rows
from turns import Turns

from psd.cli.processes import malloc

_UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


def run_server(turns: Turns) -> None:
    """Answer until the benchmark ends."""
    malloc.keep_freed_memory()
    dim = rows.Shape(*turns.arguments["shape"]).dim

    def unary(request: bytes, _: grpc.ServicerContext) -> bytes:
        return bytes(len(request) // (8 + 4 * dim) * 4 * dim)

    server = grpc.server(ThreadPoolExecutor(32), options=_UNLIMITED)
    handlers = {"Unary": grpc.unary_unary_rpc_method_handler(unary)}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("Bare", handlers)])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    turns.serve(address=f"127.0.0.1:{port}")
    server.stop(None)


def run_client(turns: Turns) -> None:
    """Push and pull when told."""
    turn = rows.Turn(turns.arguments)
    requests = [[ids.tobytes() + grads.tobytes() for ids, grads in parts] for parts in turn.parts]
    wrong: list[int] = []
    with grpc.insecure_channel(turns.arguments["address"], options=_UNLIMITED) as channel:
        call: Any = channel.unary_unary("/Bare/Unary")
        done = 0

        def step() -> None:
            nonlocal done
            for request in requests[done % len(requests)]:
                answer = call(request)
                if len(request) - len(answer) != len(answer) // (4 * turn.shape.dim) * 8:
                    wrong.append(len(answer))
            done += 1

        turns.work(step, lambda _: f"{len(wrong)} answers have another length" if wrong else "")


def main() -> None:
    """Run a server or a client."""
    turns = Turns()
    (run_client if "address" in turns.arguments else run_server)(turns)


if __name__ == "__main__":
    main()
