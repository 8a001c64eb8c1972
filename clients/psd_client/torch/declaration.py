"""The declaration of a torch model and its optimizer, checked before connecting.

Decides names and groups, and which tensors are trained and which only shared. Refuses whatever the shards would not do as torch
does. Must not know connections, gradients or steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from psd.contract.arguments import refuse
from psd.contract.errors import InvalidRequest, InvalidTensor
from psd.contract.jobspec import GroupSpec, TensorSpec
from psd.contract.rules import BUFFERS, STATIC
from psd_client.optimizers import group_spec
from psd_client.torch.embedding import TableModule, table_modules
from psd_client.torch.options import check_no_slots, check_options, rule_of
from psd_client.torch.table_declaration import TableDeclaration, declare_tables
from psd_client.worker.exchange.sent_push import JobPart
from psd_core.optimizer import Optimizer

_DTYPES = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}
_BUFFER_DTYPES = {
    **_DTYPES,
    torch.int64: "int64",
    torch.int32: "int32",
    torch.int16: "int16",
    torch.int8: "int8",
    torch.uint8: "uint8",
    torch.bool: "bool",
}

BUFFER_POLICIES = ("first", "mean", "local")


@dataclass(frozen=True)
class BufferPlace:
    """The attribute that holds a buffer. The module may assign another tensor: `self.mean = 0.9 * self.mean + 0.1 * x`."""

    module: torch.nn.Module
    name: str

    @property
    def tensor(self) -> torch.Tensor | None:
        """The buffer's current tensor."""
        return getattr(self.module, self.name)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class GivenOptimizer:
    """An optimizer that was given to `distribute`.

    Attributes:
        name: of its part of the job; empty if it is the only one. optimizer: with its param_groups.
        template: its rule. always: flags that its class implies.
    """

    name: str
    optimizer: torch.optim.Optimizer
    template: GroupSpec
    always: tuple[str, ...]


@dataclass(frozen=True)
class DeclaredPart:
    """The part of a job that one optimizer steps.

    Attributes:
        given: the optimizer. groups: indices of its param_groups among the job's groups.
        trained: positions of its parameters in TorchDeclaration.trained. tables: indices of its tables.
        job_part: the part of the job, for its pushes; None if it is the whole.
    """

    given: GivenOptimizer
    groups: range
    trained: tuple[int, ...]
    tables: frozenset[int]
    job_part: JobPart | None = None


@dataclass(frozen=True, eq=False)
class TorchDeclaration:
    """The declaration of one model and its optimizers.

    Attributes:
        parameters: the model's distinct parameters.
        places: places of the buffers that the shards keep. local_buffers: names of all buffers, if the shards keep none.
        tensors: specs of the parameters, then of these buffers, in the same order.
        trained: indices of the parameters that are pushed. frozen: indices of those in an optimizer that need no gradient.
        tables: the embeddings' tables; their groups come last. parts: what each optimizer steps, in their order.
    """

    parameters: list[torch.Tensor]
    places: list[BufferPlace]
    tensors: list[TensorSpec]
    groups: list[GroupSpec]
    trained: list[int]
    frozen: list[int]
    local_buffers: frozenset[str] = frozenset()
    tables: TableDeclaration = field(default_factory=TableDeclaration)
    parts: Sequence[DeclaredPart] = ()

    @property
    def buffers(self) -> list[torch.Tensor]:
        """The current tensors of the buffers that the shards keep.

        Raises:
            InvalidTensor: a buffer no longer has the shape that was declared.
        """
        buffers = []
        for spec, place in zip(self.tensors[len(self.parameters) :], self.places, strict=True):
            buffer = place.tensor
            if buffer is None or tuple(buffer.shape) != spec.shape:
                raise InvalidTensor(
                    f"buffer {spec.name!r} {'is None' if buffer is None else f'has the shape {tuple(buffer.shape)}'}, and was "
                    f"declared with the shape {spec.shape}; register one that changes so with persistent=False, or pass "
                    'buffers="local" to distribute()'
                )
            buffers.append(buffer)
        return buffers

    def merge(self, merges: Sequence[str]) -> None:
        """Declare how each trained parameter is merged, as in TensorSpec."""
        for index, merge in zip(self.trained, merges, strict=True):
            self.tensors[index] = replace(self.tensors[index], merge=merge)


class Options(torch.optim.Optimizer):
    """An optimizer that only holds param_groups, for a rule that torch does not have; a scheduler may be built on it."""

    def __init__(self, rule: Optimizer, params: Iterable[Any]) -> None:
        super().__init__(params, rule.option_values())
        for index, group in enumerate(self.param_groups):
            options = {name: value for name, value in group.items() if name not in ("params", "param_names")}
            unknown = sorted(options.keys() - self.defaults.keys())
            if unknown:
                raise InvalidRequest(f"params[{index}]: no option {unknown[0]!r}; there are {', '.join(sorted(self.defaults))}")
            rule.with_options(options)


def read_declaration(
    model: torch.nn.Module, given: Sequence[GivenOptimizer], buffers: str, *, is_spread: bool = False
) -> TorchDeclaration:
    """Read the declaration from a model and its optimizers, and check it.

    Args:
        buffers: "first", "mean" or "local". is_spread: parameters may be DTensors, which several processes have together.
    """
    groups = [group_spec(one.template, one.always, group) for one in given for group in one.optimizer.param_groups]
    param_groups = [group for one in given for group in one.optimizer.param_groups]
    of_group = [one.name for one in given for _ in one.optimizer.param_groups]
    embeddings = table_modules(model)
    handles = {id(embedding.handle) for embedding in embeddings}
    for embedding in embeddings:
        if embedding.rows is not None:
            raise InvalidRequest(
                f"embedding {embedding.spec.name!r}: the model has its rows, as load_state_dict has set them, and a job takes "
                "none from a model: begin the job with them by --from-checkpoint FILE --parameters-only, and call distribute "
                "with a model that was made anew, without loading them"
            )
        if not embedding.handle.is_meta and embedding.handle.any():
            raise InvalidRequest(
                f"embedding {embedding.spec.name!r}: its handle was given a value, as by an initialization of all parameters; "
                "it must be 0, and its rows begin as its `init` says"
            )
    dense = [pair for pair in model.named_parameters(remove_duplicate=False) if id(pair[1]) not in handles]
    modules = [pair for pair in model.named_modules(remove_duplicate=False) if isinstance(pair[1], TableModule)]
    every_name = _plain_names(dense, _named_buffers(model), modules)
    named, aliases = _distinct(every_name[0])
    known = {id(parameter) for _, parameter in named} | handles
    group_of: dict[int, int] = {}
    for number, options in enumerate(param_groups):
        for position, parameter in enumerate(options["params"]):
            if id(parameter) in group_of:  # torch itself refuses it twice in one optimizer
                names = f"{of_group[group_of[id(parameter)]]!r} and {of_group[number]!r}"
                raise InvalidRequest(
                    f"optimizer: a parameter of shape {tuple(parameter.shape)} is in two, {names}; a parameter has one "
                    "optimizer that steps it"
                )
            if id(parameter) not in known:
                raise InvalidRequest(
                    f"optimizer: parameter {position} of param_groups[{number}], of shape {tuple(parameter.shape)}, is not in "
                    "the model. Pass the module that holds all of them, or several by name, such as "
                    "{'encoder': encoder, 'decoder': decoder}"
                )
            group_of[id(parameter)] = number
    static = len(groups)
    tensors, trained, frozen = [], [], []
    for index, (name, parameter) in enumerate(named):
        _check_parameter(name, parameter, is_spread=is_spread)
        is_trained = id(parameter) in group_of and parameter.requires_grad
        if is_trained:
            trained.append(index)
        elif id(parameter) in group_of:
            frozen.append(index)
        group = group_of[id(parameter)] if is_trained else static
        tensors.append(TensorSpec(name, tuple(parameter.shape), _DTYPES[parameter.dtype], group, aliases[name]))
    if not trained and not embeddings:
        raise InvalidRequest("optimizer: none of its parameters has requires_grad=True, so there is nothing to train")
    _check_memory([(name, parameter) for name, parameter in named if not has_parts(parameter)])
    if len(trained) < len(tensors):
        groups.append(GroupSpec(STATIC.name))
    kept, aliases = _distinct(every_name[1] if buffers != "local" else [], lambda place: id(place.tensor))
    tensors += [_buffer_spec(name, aliases[name], place.tensor, len(groups)) for name, place in kept]
    if kept:
        groups.append(GroupSpec(BUFFERS.name, ("mean",) if buffers == "mean" else ()))
    local = frozenset(name for name, _ in every_name[1] if buffers == "local")
    tables = declare_tables(every_name[2], param_groups, group_of, groups)
    return TorchDeclaration(
        [parameter for _, parameter in named],
        [place for _, place in kept],
        tensors,
        groups + tables.groups,
        trained,
        frozen,
        local,
        tables,
        _parts(given, [tensors[index].group for index in trained], tables, group_of),
    )


def _parts(
    given: Sequence[GivenOptimizer], trained_in: Sequence[int], tables: TableDeclaration, group_of: Mapping[int, int]
) -> list[DeclaredPart]:
    """The part of each optimizer. trained_in: group of each trained parameter. group_of: as of `declare_tables`."""
    parts: list[DeclaredPart] = []
    table_in = [group_of[id(members[0].handle)] for members in tables.members.values()]
    end = 0
    for number, one in enumerate(given, 1):
        groups = range(end, end + len(one.optimizer.param_groups))
        end = groups.stop
        of_part = frozenset(index for index, group in enumerate(table_in) if group in groups)
        job_part = None
        if len(given) > 1:
            job_part = JobPart(number, frozenset([*groups, *(tables.specs[index].group for index in of_part)]))
        trained = tuple(position for position, group in enumerate(trained_in) if group in groups)
        if not trained and not of_part:
            raise InvalidRequest(f"optimizer {one.name!r}: none of its parameters has requires_grad=True")
        parts.append(DeclaredPart(one, groups, trained, of_part, job_part))
    return parts


def state_values(declaration: TorchDeclaration, state: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """The values of the declared tensors in a state_dict, in their order. Tied tensors are found by any of their names.

    Raises:
        InvalidRequest, InvalidTensor: a tensor is missing, unexpected, or has another shape.
    """
    if not isinstance(state, Mapping):
        refuse(InvalidRequest, "state_dict", "tensors by name, as model.state_dict() has them", state)
    (named,) = _plain_names(state.items())
    given = dict(named)
    values = []
    for tensor in declaration.tensors:
        names = [name for name in (tensor.name, *tensor.aliases) if name in given]
        if not names:
            raise InvalidRequest(f"state_dict: {tensor.name!r} is missing")
        value = given[names[0]]
        if tuple(value.shape) != tensor.shape:
            raise InvalidTensor(
                f"state_dict: {tensor.name!r} has the shape {tuple(value.shape)}, the model's has {tensor.shape}"
            )
        values.append(value)
        for name in names:
            del given[name]
    unexpected = given.keys() - declaration.local_buffers
    if unexpected:
        raise InvalidRequest(f"state_dict: {min(unexpected)!r} is not in the model")
    return values


def check_optimizer(optimizer: torch.optim.Optimizer) -> tuple[tuple[str, ...], GroupSpec]:
    """Check the optimizer; return the rule that corresponds to it."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer: expected one of torch.optim, or a rule of psd_client, got {optimizer!r}")
    if hasattr(optimizer, "ps"):
        raise TypeError("optimizer: is distributed already; pass the torch.optim optimizer that distribute() was given")
    kind = type(optimizer)
    rule, always = rule_of(kind, torch.optim)
    check_no_slots(optimizer.state.values(), "optimizer: it has been stepped, and its state")
    for index, group in enumerate(optimizer.param_groups):
        check_options(rule, {option: group[option] for option in optimizer.defaults}, index)
    return always, GroupSpec(rule)


def _plain_names(*lists: Iterable[tuple[str, Any]]) -> list[list[tuple[str, Any]]]:
    """Names without the parts that DistributedDataParallel and torch.compile have added."""
    named = [[(".".join(part for part in name.split(".") if part != "_orig_mod"), item) for name, item in one] for one in lists]
    names = [name for one in named for name, _ in one]
    while names and all(name.startswith("module.") for name in names):
        named = [[(name.removeprefix("module."), item) for name, item in one] for one in named]
        names = [name for one in named for name, _ in one]
    return named


def _distinct(
    named: Iterable[tuple[str, Any]], identity: Callable[[Any], int] = id
) -> tuple[list[tuple[str, Any]], dict[str, tuple[str, ...]]]:
    """Each item once, with its first name; and its other names, by the first. identity: tells items apart."""
    names: dict[int, list[str]] = {}
    items: dict[int, Any] = {}
    for name, item in named:
        names.setdefault(identity(item), []).append(name)
        items.setdefault(identity(item), item)
    found = [(names[key][0], item) for key, item in items.items()]
    return found, {first: tuple(dict.fromkeys(rest)) for first, *rest in names.values()}


def has_parts(parameter: torch.Tensor) -> bool:
    """True if a parameter is made of other tensors, as a DTensor is."""
    return hasattr(parameter, "__tensor_flatten__")


def _check_parameter(name: str, parameter: torch.nn.Parameter, *, is_spread: bool) -> None:
    if torch.nn.parameter.is_lazy(parameter):
        raise InvalidTensor(f"parameter {name!r} has no shape yet; pass one batch through the model before distribute()")
    if parameter.is_meta:
        raise InvalidTensor(f"parameter {name!r} is on the meta device and has no values; see torch.nn.Module.to_empty")
    if parameter.layout is not torch.strided:
        raise InvalidTensor(f"parameter {name!r} has layout {parameter.layout}; psd trains dense (strided) parameters")
    if has_parts(parameter) and not (is_spread and hasattr(parameter, "full_tensor")):
        raise InvalidTensor(
            f"parameter {name!r} is a {type(parameter).__name__}, which is made of other tensors, as FSDP and tensor "
            "parallelism make them; psd trains parameters that each worker has whole, in memory of their own, or DTensors of a "
            "learner's process group: distribute(..., local=psd.Local(...), group=...)"
        )
    if parameter.dtype not in _DTYPES:
        raise InvalidTensor(f"parameter {name!r} has dtype {parameter.dtype}; psd trains {', '.join(map(str, _DTYPES))}")


def _named_buffers(model: torch.nn.Module) -> Iterator[tuple[str, BufferPlace]]:
    """The buffers that are in the model's state_dict, under all of their names."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, _ in module.named_buffers(recurse=False, remove_duplicate=False):
            if name not in module._non_persistent_buffers_set:  # noqa: SLF001 - torch has no public way to ask
                yield f"{prefix}.{name}" if prefix else name, BufferPlace(module, name)


def _buffer_spec(name: str, aliases: Sequence[str], buffer: torch.Tensor, group: int) -> TensorSpec:
    """The declaration of a buffer; InvalidTensor if shards cannot keep it."""
    what = "is on the meta device" if buffer.is_meta else f"has layout {buffer.layout}"
    if torch.nn.parameter.is_lazy(buffer):
        what = "has no shape yet"
    elif buffer.layout is torch.strided and not buffer.is_meta:
        if buffer.dtype in _BUFFER_DTYPES:
            return TensorSpec(name, tuple(buffer.shape), _BUFFER_DTYPES[buffer.dtype], group, tuple(aliases))
        what = f"has dtype {buffer.dtype}"
    raise InvalidTensor(
        f'buffer {name!r} {what}, and shards cannot keep it; pass buffers="local", with which checkpoints have no buffers, or '
        "register it with persistent=False"
    )


def _check_memory(named: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
    """Raise InvalidTensor if two elements of parameters share memory: an update of one would silently change the other."""
    storages: dict[tuple[torch.device, int], list[tuple[str, torch.nn.Parameter]]] = {}
    for name, parameter in named:
        if parameter.numel():
            storage = parameter.untyped_storage()
            storages.setdefault((parameter.device, storage.data_ptr()), []).append((name, parameter))
    for members in storages.values():
        if len(members) == 1 and members[0][1].is_contiguous():
            continue
        unit = min(parameter.element_size() for _, parameter in members)
        # Which member, numbered from 1, has each cell of the storage.
        owner = torch.zeros(members[0][1].untyped_storage().nbytes() // unit, dtype=torch.int32)
        for number, (name, parameter) in enumerate(members, 1):
            width = parameter.element_size() // unit
            mine = owner.as_strided(
                (*parameter.shape, width), (*(width * n for n in parameter.stride()), 1), width * parameter.storage_offset()
            )
            other = int(mine.max())
            if other:
                first = members[other - 1][0]
                raise InvalidTensor(f"parameter {name!r} shares memory with {first!r}; to tie them, use one Parameter for both")
            mine.fill_(number)
            if int((owner == number).sum()) != mine.numel():
                raise InvalidTensor(f"parameter {name!r} is expanded: its elements share memory; call contiguous() on it first")
