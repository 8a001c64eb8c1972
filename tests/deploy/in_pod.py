"""Becomes a program of a played pod, which asks the played cluster's name server, and not this machine's.

python in_pod.py -m MODULE ARGUMENTS, or in_pod.py SCRIPT ARGUMENTS. CLUSTER_DNS: the name server's port. CLUSTER_NAMES: a JSON
file of the same table.
"""

from __future__ import annotations

import functools
import json
import os
import runpy
import socket
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import grpc

_getaddrinfo = socket.getaddrinfo


def _lookup(host: Any, *args: Any, **kwargs: Any) -> Any:
    names = json.loads(Path(os.environ["CLUSTER_NAMES"]).read_text())
    return _getaddrinfo(names.get(host, host), *args, **kwargs)


def _asking(open_channel: Any) -> Any:
    @functools.wraps(open_channel)
    def opened(target: str, *args: Any, **kwargs: Any) -> Any:
        return open_channel(f"dns://127.0.0.1:{os.environ['CLUSTER_DNS']}/{target}", *args, **kwargs)

    return opened


def main() -> None:
    socket.getaddrinfo = _lookup
    grpc.insecure_channel = _asking(grpc.insecure_channel)
    grpc.secure_channel = _asking(grpc.secure_channel)
    del sys.argv[0]
    if sys.argv[0] == "-m":
        del sys.argv[0]
        sys.exit(import_module(sys.argv[0]).main())
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
