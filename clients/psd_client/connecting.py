"""connect(): a worker's or a reader's connection to its job, or to a private shard of this process.

Must not know what travels on the connection.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from typing import Literal, overload

from typing_extensions import Unpack

from psd.contract.config import ClientConfig, ConfigError, alternatives, is_loopback
from psd.contract.credentials import Credentials
from psd.contract.environment import client_config, why_not_alone
from psd.contract.keywords import ConnectKeywords, LinkKeywords, takes
from psd_client.client import ParameterServer
from psd_client.lanes.shard_lane import ShardLane
from psd_client.lanes.transport import Lane
from psd_client.reader import Reader
from psd_client.standalone import PrivateShard, listed

logger = logging.getLogger("psd_client")

NOT_ALONE = ("servers", "rank", "world_size", "tls_ca", "tls_cert", "tls_key", "token_file")
"""Keywords that a program does not need which trains alone."""

_LEFT: set[object] = set()  # run, servers and rank of this process's workers that have left


@overload
def connect(
    servers: str | Sequence[str] | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    *,
    role: Literal["worker"] = "worker",
    **settings: Unpack[LinkKeywords],
) -> ParameterServer: ...
@overload
def connect(
    servers: str | Sequence[str] | None = None,
    rank: None = None,
    world_size: int | None = None,
    *,
    role: Literal["reader"],
    **settings: Unpack[LinkKeywords],
) -> Reader: ...
@takes(LinkKeywords)
def connect(
    servers: str | Sequence[str] | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    *,
    role: Literal["worker", "reader"] = "worker",
    **settings: Unpack[LinkKeywords],
) -> ParameterServer | Reader:
    """Join a job as one of its workers, or read from it.

    Arguments that are not given come from the environment, which psd-run sets: PSD_SERVERS, PSD_RANK and so on.

    A program trains alone if neither `servers` nor `rank` is given, no PSD_* variable says where a job is, and WORLD_SIZE is
    not above 1. It is then the only worker of a job on a private shard: a process that ends with the connection, or with this
    process. Each connection has its own private shard; a reader reads from the latest one. PSD_STANDALONE=0 forbids this.

    Args:
        servers: the shards' addresses in their order, such as "10.0.0.1:7000,10.0.0.2:7000", or a list of them. For a reader
            also a relay's, or those of several relays, "10.0.0.8:7100|10.0.0.9:7100", of which it uses one at a time.
        rank, world_size: this worker's number from 0, and how many workers there are.
        role: "worker"; or "reader", which has no rank, takes part in nothing, and pulls consistent copies while others train.
        **settings

    Raises:
        ConfigError: a value is wrong or missing, a file cannot be used, or the transport does not work here.
        TlsFailed: one side does not accept the other's certificate, or only one side uses TLS; the message says which and why.
        Unauthenticated, PermissionDenied: the token is unknown, or does not allow this role.
        ShardUnavailable: a shard could not be reached within the retry timeout.
        WrongShard, ForeignRun, SpecMismatch: the shards belong to another job, or are listed in another order.
    """
    if role not in ("worker", "reader"):
        raise ConfigError(f'role: expected "worker" or "reader", got {role!r}')
    if role == "reader" and rank is not None:
        raise ConfigError(f"rank: is {rank}, but a reader has none")
    given = {"servers": servers, "rank": rank, "world_size": world_size, **settings}
    if all(given.get(name) is None for name in NOT_ALONE) and not why_not_alone():
        return _connect_alone(role, settings)
    if role == "reader":
        rank, world_size = 0, 1
    config = client_config(servers=servers, rank=rank, world_size=world_size, **settings)
    credentials = Credentials(config.tls_ca, config.tls_cert, config.tls_key, config.token_file)
    choices = [server for server in config.servers if len(alternatives(server)) > 1]
    if choices and role != "reader":
        raise ConfigError(
            f"servers: {choices[0]!r} names relays to choose from, which serve readers; a worker needs the shards"
        )
    addresses = [address for server in config.servers for address in alternatives(server)]
    if credentials.has_token and not (credentials.has_tls or all(map(is_loopback, addresses))):
        logger.warning("psd: without tls_ca the token crosses the network unencrypted, where anybody who listens can take it")
    is_reader = role == "reader"
    lanes = [
        ShardLane(shard, address, config.transport, credentials, is_reader=is_reader)
        for shard, address in enumerate(config.servers)
    ]
    if is_reader:
        return Reader(config, lanes)
    place = (config.run_id, config.servers, config.rank)
    if config.run_id and place in _LEFT:
        logger.warning(
            "psd: worker %d of %s has left its job before, by close(). The shards of psd-run end when all workers have left, "
            "and do not answer then: connect once in a run, or train alone, without psd-run",
            *(config.rank, config.run_id),
        )
    return ParameterServer(config, lanes, lambda: _LEFT.add(place))


def _connect_alone(role: str, settings: LinkKeywords) -> ParameterServer | Reader:
    """Connect as the one worker of a job of this process, or as a reader of the latest such job."""
    if role == "reader":
        training = PrivateShard.newest()
        if training is None:
            raise ConfigError("servers: not given, and this process has no private shard to read from: it is not training")
        config, lanes = _private(training.address, settings, is_reader=True)
        return Reader(config, lanes)
    shard = PrivateShard()
    ends = contextlib.ExitStack()
    ends.callback(shard.close)
    try:
        config, lanes = _private(shard.wait_ready(), settings)
        logger.warning(
            "psd: training alone, on a private shard of this process at %s, because no servers are given (psd-run starts "
            "several workers; PSD_STANDALONE=0 forbids this)",
            shard.address,
        )
        ends.callback(listed(shard.address, 1))
        return ParameterServer(config, lanes, ends.close)
    except BaseException:
        ends.close()
        raise


def _private(address: str, settings: LinkKeywords, *, is_reader: bool = False) -> tuple[ClientConfig, list[Lane]]:
    """The settings and the lane for a private shard's only worker, or for a reader. A private shard has no TLS, no tokens and
    no run_id; what the environment says of them is ignored."""
    alone: ConnectKeywords = {**settings, "servers": address, "rank": 0, "world_size": 1}
    alone["run_id"] = settings.get("run_id") or ""
    alone["tls_ca"] = alone["tls_cert"] = alone["tls_key"] = alone["token_file"] = ""
    config = client_config(**alone)
    return config, [ShardLane(0, address, config.transport, Credentials(), is_reader=is_reader)]
