"""Python gRPC with the bytes of a step, prepared beforehand, and no arithmetic: the cost of gRPC itself. A server, or a client.

unary: one message each way. stream: 1 MiB messages, both ways at once. The processes have the malloc settings of psd's.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import work
from turns import Turns

from psd.cli.processes import malloc

_UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


def run_server(turns: Turns, parameters: bytes) -> None:
    """Answer until the benchmark ends."""
    malloc.keep_freed_memory()
    messages = work.cut(parameters)

    def unary(_: bytes, __: grpc.ServicerContext) -> bytes:
        return parameters

    def stream(requests: Iterator[bytes], _: grpc.ServicerContext) -> Iterator[bytes]:
        for message, _request in zip(messages, requests, strict=False):
            yield message

    server = grpc.server(ThreadPoolExecutor(32), options=_UNLIMITED)
    handlers = {
        "Unary": grpc.unary_unary_rpc_method_handler(unary),
        "Stream": grpc.stream_stream_rpc_method_handler(stream),
    }
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("Bare", handlers)])
    listen = turns.arguments["listen"]
    port = server.add_insecure_port(listen)
    server.start()
    turns.serve(address=f"{listen.rsplit(':', 1)[0]}:{port}")
    server.stop(None)


def run_client(turns: Turns, parameters: bytes) -> None:
    """Push and pull when told."""
    gradients = work.gradient(0, len(parameters) // 4).tobytes()
    messages = work.cut(gradients)
    answers: list[bytes] = []
    with grpc.insecure_channel(turns.arguments["address"], options=_UNLIMITED) as channel:
        call_unary: Any = channel.unary_unary("/Bare/Unary")
        call_stream: Any = channel.stream_stream("/Bare/Stream")

        def unary() -> None:
            answers[:] = [call_unary(gradients)]

        def stream() -> None:
            for answers[:] in ([answer] for answer in call_stream(iter(messages))):
                pass

        def verify(_: list[int]) -> str:
            return "" if parameters.endswith(answers[0]) else "the bytes that came are not the server's"

        turns.work(unary if turns.arguments["pattern"] == "unary" else stream, verify)


def main() -> None:
    """Run a server or a client."""
    turns = Turns()
    parameters = work.gradient(7, work.size_of(turns.arguments["model"])).tobytes()
    (run_client if "address" in turns.arguments else run_server)(turns, parameters)


if __name__ == "__main__":
    main()
