"""publish(): a store of versioned tensors for programs whose training is elsewhere; each put is one version, for all readers.

A store is a job that trains nothing: a put is its round, and sets the tensors (psd/contract/publications.py). Must not know
shards, sessions or bytes.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Unpack

from psd.contract.arguments import refuse, whole_number
from psd.contract.environment import why_not_alone
from psd.contract.errors import InvalidRequest, InvalidTensor, NotDeclared, RolledBack
from psd.contract.jobspec import GroupSpec, TensorSpec
from psd.contract.keywords import LinkKeywords, takes
from psd.contract.publications import META_BYTES, META_TENSOR, Meta, encode_meta, meta_size
from psd.contract.rules import PUBLISHED
from psd_client.client import ParameterServer, worker_of
from psd_client.connecting import connect
from psd_client.lanes.flat import FlatBuffers
from psd_client.published_values import published_specs, values_of
from psd_client.worker.exchange.value_exchange import ValueExchange

logger = logging.getLogger("psd_client")

GONE_BACK_MAX = 5
"""Times that one put begins anew because the store has gone back to a checkpoint meanwhile."""


@takes(LinkKeywords)
def publish(
    servers: str | Sequence[str] | None = None,
    *,
    like: Mapping[str, Any] | None = None,
    parts: Sequence[Mapping[str, Any]] | None = None,
    rank: int | None = None,
    meta_bytes: int = META_BYTES,
    nan_policy: str = "refuse",
    **settings: Unpack[LinkKeywords],
) -> Store:
    """Open a store of versioned tensors, such as the weights of a policy, which `connect(role="reader")` reads.

        with psd_client.publish("10.0.0.1:7000") as store:
            version = store.put(model.state_dict(), meta={"step": 1200})

    The first put, or `like`, says which tensors there are; all later ones have the same names, shapes and dtypes. Under
    psd-run, `servers` comes from PSD_SERVERS. Without servers the store is on a private shard, which ends with this process.
    A store that was declared before goes on: whoever opens it takes the place of its earlier publisher.

    Args:
        servers: the shards' addresses in their order, such as "10.0.0.1:7000,10.0.0.2:7000", or a list of them.
        like: named values that say which tensors there are, before the first put. Their numbers are not looked at.
        parts: if several processes publish together: for each of them, by rank, what `like` is. Each puts its own part; a
            version is there once all have put theirs.
        rank: number of this process among those of `parts`.
        meta_bytes: the largest meta, up to 64 KiB. It takes this room in each version.
        nan_policy: "refuse" raises an error for NaN and infinity; "allow" publishes them.
        **settings

    Raises:
        ConfigError, TlsFailed, Unauthenticated, PermissionDenied, ShardUnavailable: as from `connect`.
        InvalidRequest, InvalidTensor: an argument is wrong; a tensor is named.
        SpecMismatch: with `like` or `parts`: the store has other tensors; the message names the first difference.
    """
    if like is not None and parts is not None:
        raise InvalidRequest("like: parts say already which tensors there are")
    if parts is not None and (not isinstance(parts, (list, tuple)) or not parts):
        refuse(InvalidRequest, "parts", "a list with the tensors of each process", parts)
    count = 1 if parts is None else len(parts)
    if rank is not None and not 0 <= whole_number(InvalidRequest, "rank", rank) < count:
        raise InvalidRequest(f"rank: must be 0 to {count - 1}, got {rank}")
    if rank is None and count > 1:
        raise InvalidRequest(f"rank: not given; it says which of the {count} parts this process puts")
    declaration = StoreDeclaration(rank or 0, meta_size(meta_bytes), nan_policy)
    given = [like] if like is not None else parts
    known = None if given is None else declaration.specs(given)
    if servers is None and count == 1 and not why_not_alone():
        ps = connect(**settings)
    else:
        ps = connect(servers, rank or 0, count, **settings)
    store = Store(ps, declaration)
    try:
        if known is not None:
            store.declare(known)
    except BaseException:
        ps.close()
        raise
    return store


class StoreDeclaration:
    """Terms of a store, as one rank declares them.

    Args:
        rank: of the process. meta_elements: size of the meta's tensor. nan_policy: as publish has it.
    """

    def __init__(self, rank: int, meta_elements: int, nan_policy: str) -> None:
        if nan_policy not in ("refuse", "allow"):
            raise InvalidRequest(f"nan_policy: must be refuse or allow, got {nan_policy!r}")
        self.rank, self.nan_policy = rank, nan_policy
        self._meta_elements = meta_elements

    def specs(self, parts: Sequence[Mapping[str, Any]]) -> list[TensorSpec]:
        """Declarations of all ranks' tensors, and then of the meta."""
        what = "state" if len(parts) == 1 else "parts"
        found = [spec for group, part in enumerate(parts) for spec in published_specs(part, group, what)]
        return [*found, TensorSpec(META_TENSOR, (self._meta_elements,), "uint8", len(parts))]

    def meta(self, meta: Meta) -> NDArray[np.uint8]:
        """The meta's tensor."""
        return encode_meta(meta, self._meta_elements)


class Store:
    """A store of versioned tensors, made by `publish`: the side that puts. A context manager; used by one thread at a time.

    Args:
        ps: the connection; closed with the store.

    Attributes:
        version: the version that the last put has made; before, the one that the store had when it was declared: 0, there is
            none yet.
    """

    def __init__(self, ps: ParameterServer, declaration: StoreDeclaration) -> None:
        self._ps = ps
        self._worker = worker_of(ps)
        self._declaration = declaration
        self._tensors: list[TensorSpec] | None = None
        self.version = 0

    def declare(self, tensors: list[TensorSpec]) -> None:
        """Agree with the shards on the tensors; not for programs, which say so by `like`, `parts` or the first put."""
        groups = [GroupSpec(PUBLISHED.name)] * (tensors[-1].group + 1)
        self._worker.declare_tensors(
            tensors,
            groups,
            initial=lambda _: None,
            exchange_kind=ValueExchange,
            consistency="sync",
            aggregation="exact",
            reduce="sum",
            quorum=self._worker.world_size,
            nan_policy=self._declaration.nan_policy,
        )
        self._tensors = tensors
        self.version = self._worker.clock

    def put(self, state: Mapping[str, Any], meta: Meta = None) -> int:
        """Publish values for all tensors at once, as one version; return the version, from 1.

        When this returns, every reader can have the version, and all shards hold it. If it raises, the version is there whole
        or not at all, for every reader; the same call, made again, completes it, and counts once.

        Args:
            state: NumPy's arrays or torch's tensors by name: all that were declared, or with `parts` all of this rank's. They
                are copied, from any device.
            meta: what readers get with the version: a dict that JSON can hold, or bytes. With `parts` all ranks give the same,
                by which they know that they put parts of one version, such as {"step": step}.

        Raises:
            InvalidTensor: a name, shape or dtype is another one than was declared. InvalidRequest: the meta is too long, or
                JSON cannot hold it, or another rank has given another one. NonFiniteGradient: a tensor holds NaN or infinity.
                Nothing was published.
            SpecMismatch: at the first put: the store has other tensors.
            SessionFenced: another process publishes here now. Drained: the job ends (psdctl drain).
            ShardUnavailable, WaitTimeout, OutOfSpace: call again.
        """
        encoded = self._declaration.meta(meta)
        tag = b""
        if self._worker.world_size > 1:
            if meta is None:
                raise InvalidRequest("meta: not given; by it several processes know that they put parts of one version")
            tag = hashlib.blake2b(encoded.data, digest_size=16).digest()
        if self._tensors is None:
            self.declare(self._declaration.specs([state]))
        values, present = self._checked(state)

        def write(buffers: FlatBuffers) -> None:
            for index, array in values.items():
                buffers.views[index][...] = array
            if self._declaration.rank == 0:
                buffers.views[-1][...] = encoded

        for attempt in range(GONE_BACK_MAX):
            try:
                self.version = self._worker.put_flat(write, present, tag)
                break
            except RolledBack as error:  # what is put depends on nothing that was there
                if attempt == GONE_BACK_MAX - 1:
                    raise
                logger.warning("psd: put begins anew: %s", error)
        return self.version

    def _checked(self, state: Mapping[str, Any]) -> tuple[dict[int, NDArray[Any]], NDArray[np.bool_] | None]:
        """The values of this rank's tensors by index, and which tensors this rank publishes; None: all."""
        if self._tensors is None:
            raise NotDeclared("put: the store is not declared")
        if not isinstance(state, Mapping):
            refuse(InvalidTensor, "state", "tensors by name", state)
        rank = self._declaration.rank
        own = {spec.name: index for index, spec in enumerate(self._tensors[:-1]) if spec.group == rank}
        unknown = next((name for name in state if name not in own), None)
        missing = next((name for name in own if name not in state), None)
        if unknown is not None or missing is not None:
            what = f"{unknown!r} was not declared" if unknown is not None else f"{missing!r} is missing"
            raise InvalidTensor(f"state: {what}; each put has the tensors of the first one, {len(own)} in number")
        values = {index: values_of(self._tensors[index], state[name], f"state[{name!r}]") for name, index in own.items()}
        if self._worker.world_size == 1:
            return values, None
        present = np.array([spec.group == rank for spec in self._tensors])
        present[-1] = rank == 0
        return values, present

    def close(self) -> None:
        """Disconnect. The versions stay with the shards; a private shard ends. Idempotent."""
        self._ps.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._ps.__exit__(kind, error, traceback)
