"""The shard's end of a bulk lane as a test has it behave, and a lane that is told where it is instead of asking over gRPC."""

from __future__ import annotations

import os
import secrets
import socket
import threading
from collections.abc import Callable
from typing import Any

from client_faults import Thread

from psd.contract.errors import ShardUnavailable
from psd.contract.wire import Kind, Stream
from psd.v1 import bulk_pb2, control_pb2
from psd_client.lanes.bulk_connection import HEAD_BYTES_MAX
from psd_client.lanes.shard_lane import ShardLane
from psd_client.lanes.transport import Call

Script = Callable[["Conversation"], None]


class Conversation:
    """One connection of a worker's. `ended`: the test is over."""

    def __init__(self, sock: socket.socket, ended: threading.Event) -> None:
        self.stream = Stream(sock, HEAD_BYTES_MAX)
        self.ended = ended
        self.memory_fd = -1

    def welcome(self) -> None:
        self.stream.receive()
        self.stream.send(Kind.WELCOME)

    def take_memory(self) -> None:
        """See the worker's memory, without a look at it."""
        self.stream.receive()
        self.stream.send(Kind.SEND)
        _, (self.memory_fd,), _, _ = socket.recv_fds(self.stream.socket, 1, 1)
        self.stream.send(Kind.READY, bulk_pb2.BulkReady(nonce=os.pread(self.memory_fd, 16, 0)).SerializeToString())

    def wait(self) -> None:
        """Say nothing, and read nothing, until the test is over."""
        self.ended.wait(100)


class ScriptedShard:
    """Takes connections, over TCP or a local socket, and runs the next script with each; the last one for all that follow."""

    def __init__(self, *scripts: Script, local: bool = False) -> None:
        self.local_name = f"psd-test-{secrets.token_hex(8)}" if local else ""
        if local:
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._listener.bind(f"\0{self.local_name}")
            self._listener.listen()
            self.port = 0
        else:
            self._listener = socket.create_server(("127.0.0.1", 0))
            self.port = self._listener.getsockname()[1]
        self.conversations: list[Conversation] = []
        self._scripts = list(scripts)
        self._ended = threading.Event()
        self._threads = [Thread(self._accept)]

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            conversation = Conversation(sock, self._ended)
            script = self._scripts.pop(0) if len(self._scripts) > 1 else self._scripts[0]
            self.conversations.append(conversation)
            self._threads.append(Thread(lambda script=script, conversation=conversation: script(conversation)))

    def close(self) -> None:
        self._ended.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.result()
        for conversation in self.conversations:
            conversation.stream.close()


class ToldLane(ShardLane):
    """Does not ask a shard where its bulk port is. Every answer after the first `answers` is missing."""

    def __init__(self, port: int, *, local_name: str = "", transport: str = "tcp", answers: int = 1000) -> None:
        super().__init__(0, "127.0.0.1:9", transport)
        self._reply = control_pb2.OpenBulkReply(ticket=b"ticket", tcp_port=port, local_name=local_name)
        self._answers = answers

    def open_bulk(self, request: Any, call: Call) -> control_pb2.OpenBulkReply:
        if self._answers == 0:
            raise ShardUnavailable("gone")
        self._answers -= 1
        return self._reply
