"""The keywords by which a program says what its job is like, and how it connects: name, type, default and meaning, once.

Calls that pass them on are decorated with `takes`, which shows all of them in the call's signature and docstring, and refuses
others. Must not know which values are right: FlatCalls.declare_tensors, environment.py and config.py check them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from os import PathLike
from types import MappingProxyType
from typing import Any, TypeVar, cast

from typing_extensions import TypedDict

CallT = TypeVar("CallT", bound=Callable[..., Any])


class JobKeywords(TypedDict, total=False):
    """Terms of a job. All of its workers say the same.

    Attributes:
        consistency: "sync", "async" or "ssp:S"; None takes PSD_CONSISTENCY, or "sync".
        reduce: "mean" over the samples, by the pushes' weights (batch sizes), or "sum"; None takes PSD_REDUCE, or "mean".
        quorum: workers whose gradients close a synchronous round; None takes PSD_QUORUM, or all.
        grace: seconds for which a round waits on for the others, once it has its quorum; or "auto", for learners (`local`): as
            long as those whose differences it has go on computing without it. Implies "exact". None: not at all.
        aggregation: "fast", gradients are added as they arrive; or "exact", in the order of the ranks, those of a worker on all
            shards or on none: the same bits whatever the timing and whatever dies, but of tables with `expire_seconds`, in
            which time has a part. Synchronous only. None takes PSD_AGGREGATION, or "fast".
        staleness: async and ssp: treatment of gradients whose parameters have been updated since their worker read them, `age`
            times. "lr" divides the learning rate by 1 + age. See docs/consistency.md.
        clip_norm: the largest norm that a round's gradient may have, over all parameters and rows, and the workers' mean (or
            sum): a longer one is scaled down, as torch.nn.utils.clip_grad_norm_ does in one process; called in a worker, that
            clips the worker's own. Without rounds: each push's. Implies "exact".
        nan_policy: treatment of NaN and infinity in gradients: "refuse", an error that names worker, parameter and step;
            "skip", the round changes nothing on any shard (see `ParameterServer.is_skipped`), implies "exact"; "allow". Loss
            scaling (torch's GradScaler, Keras's "mixed_float16") needs "skip": all workers then skip the same rounds.
        compress: form in which gradients of float32 travel: "bf16", "fp16", "int8", "int4", "int4log", "sign", or "topk:0.01",
            the largest hundredth; None: as they are. See docs/compression.md.
        pull: form in which parameters of float32 come back, "bf16" or "fp16"; or, synchronous only, their differences from
            round to round, "int8", "int4" or "int4log"; None: as they are. The shards keep all bits.
        error_feedback: True: what compression has lost of a gradient stays with its worker, and is added to the next one.
        rounding: of compressed gradients: "nearest", or "stochastic", up or down at random, from a seed that is fixed for each
            push; None: "nearest" with error feedback, else "stochastic".
    """

    consistency: str | None
    reduce: str | None
    quorum: int | None
    grace: float | str | None
    aggregation: str | None
    staleness: str | None
    clip_norm: float | None
    nan_policy: str
    compress: str | None
    pull: str | None
    error_feedback: bool
    rounding: str | None


class LinkKeywords(TypedDict, total=False):
    """A connection's settings, apart from where it leads.

    Attributes:
        run_id: name of the job; shards that serve another one refuse.
        transport: how bulk data travels: "shm", shared memory with shards on this machine; "tcp"; "grpc"; or "auto", the first
            of these that works, for each shard. `ParameterServer.transports` says which, and why not a better one.
        streams: TCP connections to each shard over which "tcp" divides large pushes and pulls, 1 to 32 (default 1): for long
            links, of which one carries no more than its window in each round trip. Not with "shm" or "grpc".
        wait_timeout: seconds, the longest wait for other workers, in a round, a barrier or at the beginning (default 600).
        retry_timeout: seconds for which an unreachable shard is tried again (default 30).
        report_after: seconds after which a wait is explained on the log, and again when it has doubled (default 5).
        tls_ca: PEM file of the authorities that sign the shards' certificates; turns TLS on. The certificates must name the
            hosts as `servers` does.
        tls_cert, tls_key: PEM files with this client's own certificate and its key, if the shards require one.
        token_file: file that holds this client's token, if the shards require one. Files are read again when they change.
    """

    run_id: str | None
    transport: str | None
    streams: int | None
    wait_timeout: float | None
    retry_timeout: float | None
    report_after: float | None
    tls_ca: str | PathLike[str] | None
    tls_cert: str | PathLike[str] | None
    tls_key: str | PathLike[str] | None
    token_file: str | PathLike[str] | None


class ConnectKeywords(LinkKeywords, total=False):
    """A connection's settings, and where it leads.

    Attributes:
        servers: the shards' addresses in their order, such as "10.0.0.1:7000,10.0.0.2:7000", or a list of them.
        rank, world_size: this worker's number from 0, and how many workers there are.
    """

    servers: str | Sequence[str] | None
    rank: int | None
    world_size: int | None


class FaceKeywords(JobKeywords, ConnectKeywords, total=False):
    """All that a face's `distribute` passes on to the job's declaration and to `connect`."""


DEFAULTS: Mapping[str, Any] = MappingProxyType({"nan_policy": "refuse", "error_feedback": True})
"""Defaults of the keywords for which it is not None."""

LOCAL_STEPS_ELSEWHERE = {
    "local": "local steps are made by PyTorch's face alone: psd_client.torch.distribute(..., "
    "local=psd_client.torch.Local(...)); here a program may exchange differences of its own: psd_client.connect().declare with "
    "the outer rule, and push_pull of the base less the parameters; docs/far-apart.md has an example"
}
"""Advice for the faces that make no local steps."""

OF_CONNECT = frozenset(ConnectKeywords.__annotations__)


def takes(*kinds: Any, elsewhere: Mapping[str, str] = MappingProxyType({})) -> Callable[[CallT], CallT]:
    """Decorate a function that ends with `**name: Unpack[...]`: it shows the keywords of these kinds in its signature and, in
    place of the line "**name" of its docstring, what they mean. For others it raises TypeError, naming the most similar one.

    Args:
        elsewhere: advice by name, for keywords that are at home elsewhere.
    """

    def decorate(function: CallT) -> CallT:
        shown = inspect.signature(function)
        *own, others = shown.parameters.values()
        hints = {name: getattr(hint, "__forward_arg__", hint) for kind in kinds for name, hint in kind.__annotations__.items()}
        more = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=DEFAULTS.get(name), annotation=hint)
            for name, hint in hints.items()
        ]
        known = [each.name for each in (*own, *more)]

        @functools.wraps(function)
        def checked(*args: Any, **given: Any) -> Any:
            for name in given.keys() - known:
                if name in elsewhere:
                    raise TypeError(f"{name}: {elsewhere[name]}")
                likely = get_close_matches(name, known, 1)
                hint = f"; did you mean {likely[0]!r}?" if likely else ""
                raise TypeError(f"{function.__qualname__}() got an unexpected keyword argument {name!r}{hint}")
            return function(*args, **given)

        checked.__signature__ = shown.replace(parameters=[*own, *more])  # type: ignore[attr-defined]
        if function.__doc__ is not None:  # there are none under python -OO
            meanings = "\n".join([inspect.cleandoc(kind.__doc__).partition("Attributes:\n")[2] for kind in kinds])
            checked.__doc__ = inspect.cleandoc(function.__doc__).replace(f"    **{others.name}", meanings)
        return cast(CallT, checked)

    return decorate
