"""A site customization for a played pod: it asks the played cluster's name server, and not this machine's.

Python imports it at its start, by its name. CLUSTER_DNS: the name server's port. CLUSTER_NAMES: a JSON file of the same table.
"""

from __future__ import annotations

import functools
import json
import os
import socket
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


socket.getaddrinfo = _lookup
grpc.insecure_channel = _asking(grpc.insecure_channel)
grpc.secure_channel = _asking(grpc.secure_channel)
