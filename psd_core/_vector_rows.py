"""The parts of the rows of vector_operations.py: what an operation takes, as it follows from the method that says it.

Owns the form of an operation, and how the arguments of a call become one. Must not know any operation; nor vectors, messages or
stores. Imports the standard library alone, because setup.py loads it before psd_core can be imported.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, Generic, NamedTuple, ParamSpec, TypeVar, overload

if TYPE_CHECKING:
    from numpy.typing import NDArray

P = ParamSpec("P")
Value = TypeVar("Value")
AnswerT = TypeVar("AnswerT")

ANY = -1
"""Number of vectors that a kind of operation reads, if it leaves that to the call."""


class Operand:
    """A vector, as programs pass it to operations; psd_client.Vector is one."""


class Notes(Generic[AnswerT]):
    """Something whose methods note operations, with the vector as the first argument; psd_client.Batch is one.

    AnswerT: what those of reductions return.
    """


class VectorOperation(NamedTuple):
    """One operation. What its kind does not take stays empty.

    Attributes:
        name: of its kind. out: the vector that it writes. x, y: those that it reads.
        numbers: in the order of the method's arguments.
        function: by its name, if it is built in. A user's: to programs and in messages by its import path, to stores itself.
        start, places, values: what it brings: values, for the elements from `start` on, or for `places`, indices or rows.
    """

    name: str
    out: str = ""
    x: Sequence[str] = ()
    y: Sequence[str] = ()
    numbers: Sequence[float] = ()
    function: str | Callable[..., Any] = ""
    seed: int = 0
    start: int = 0
    places: NDArray[Any] | None = None
    values: NDArray[Any] | None = None


class OperationKind(NamedTuple):
    """Facts of all operations of one name: what they take.

    Attributes:
        number: in messages, and, if it is `loop`'s, in C. loop: the kind whose loop in C computes it.
        x, y: number of vectors that it reads, or ANY; of y there may be none then.
        numbers: their names. Of a kind with ANY x: the name of a list, of one number for each of x.
        functions: those that are built in, one of which it names, with the names of the numbers that each takes.
        brings: "", or what its array is for: "range", "indices" or "rows".
        writes: it writes `out`; others answer. reads_out: it reads that first.
    """

    name: str
    number: int
    loop: str
    x: int = 0
    y: int = 0
    numbers: tuple[str, ...] = ()
    functions: Mapping[str, tuple[str, ...]] | None = None
    brings: str = ""
    writes: bool = True
    reads_out: bool = False


class Row(Generic[P]):
    """A row of the table: a method of batches and of vectors, which says by its arguments what the kind takes.

    An argument is, by its annotation, a vector to read (Operand), several (Sequence[Operand]), a number (float), a number for
    each of several vectors (Sequence[float]), the seed (int), or the name of a function (str). `*arguments` are the function's
    numbers; `of` stands for the first vector to read, which else is the one that the method is called on.

    Args:
        method: the method. Its body is never run; its docstring is that of all methods made of it.
        number: of the kind. kind_name: the kind, if it is not the method's own.
        take: of a reduction: what makes its value of what is found, given that and whether its vectors are int64.
    """

    def __init__(
        self,
        method: Callable[Concatenate[Any, P], Any],
        number: int,
        *,
        reads_out: bool = False,
        functions: Mapping[str, tuple[str, ...]] | None = None,
        take: Callable[[Any, bool], Any] | None = None,
        kind_name: str = "",
    ) -> None:
        self.name, self.doc, self.take = method.__name__, inspect.getdoc(method), take
        self.signature = inspect.signature(method)
        _, *arguments = self.signature.parameters.values()
        self._is_plain = all(argument.kind is argument.POSITIONAL_OR_KEYWORD for argument in arguments)
        self._sorts = sorts = [
            "Sequence[float]" if argument.kind is argument.VAR_POSITIONAL else str(argument.annotation)
            for argument in arguments
        ]
        x = sorts.count("Operand") + sorts.count("Operand | None") + (take is not None)
        numbers = tuple(argument.name for argument in arguments if argument.annotation in ("float", "Sequence[float]"))
        self.kind = OperationKind(
            kind_name or self.name, number, kind_name or self.name, ANY if "Sequence[Operand]" in sorts else x,
            numbers=() if functions else numbers, functions=functions, writes=take is None, reads_out=reads_out,
        )  # fmt: skip

    def __call__(self, on: str, *args: Any, **kwargs: Any) -> VectorOperation:
        """The operation that a call says, of vectors by name."""
        return self.said(str, on, args, kwargs)

    def said(self, name_of: Callable[[Any], str], on: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> VectorOperation:
        """The operation that a call says. name_of: gives the name of what is passed as a vector."""
        kind, on = self.kind, name_of(on)
        x, numbers, function, seed = list[str]() if kind.writes else [on], list[float](), "", 0
        for sort, value in zip(self._sorts, self._values(on, args, kwargs), strict=True):
            if sort == "Operand":
                x.append(name_of(value))
            elif sort == "float":
                numbers.append(value)
            elif sort == "Operand | None":
                x.insert(0, on if value is None else name_of(value))
            elif sort == "Sequence[Operand]":
                x.extend(map(name_of, value))
            elif sort == "Sequence[float]":
                numbers += value
            elif sort == "str":
                function = value
            else:
                seed = value
        return VectorOperation(kind.name, on if kind.writes else "", x, (), numbers, function, seed)

    def _values(self, on: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Any]:
        """Values of all arguments. What is called in the plain way, and often, is not matched with the signature."""
        if not kwargs and len(args) == len(self._sorts) and self._is_plain:
            return args
        given = self.signature.bind(on, *args, **kwargs)
        given.apply_defaults()
        return [*given.arguments.values()][1:]

    def as_method(self, owner: type, function: Callable[..., Any], *first: str, returns: str | None = None) -> Any:
        """The function with the row's name, docstring and arguments, after others that come `first`."""
        extra = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation="Vector") for name in first]
        own, *rest = (
            parameter.replace(annotation=str(parameter.annotation).replace("Operand", "Vector"))
            if parameter.annotation is not parameter.empty
            else parameter
            for parameter in self.signature.parameters.values()
        )
        method: Any = function
        method.__signature__ = self.signature.replace(
            parameters=[own, *extra, *rest], return_annotation=returns or self.signature.return_annotation
        )
        method.__name__, method.__qualname__, method.__doc__ = self.name, f"{owner.__qualname__}.{self.name}", self.doc
        method.__module__ = owner.__module__
        return method


class ChangeRow(Row[P]):
    """A row of what writes to a vector."""

    if TYPE_CHECKING:

        @overload
        def __get__(self, instance: None, owner: type) -> Row[P]: ...
        @overload
        def __get__(self, instance: Operand, owner: type) -> Callable[P, None]: ...
        @overload
        def __get__(self, instance: Notes[Any], owner: type) -> Callable[Concatenate[Any, P], None]: ...
        def __get__(self, instance: Any, owner: type) -> Any: ...


class ReductionRow(Row[P], Generic[P, Value]):
    """A row of what finds something out about vectors."""

    if TYPE_CHECKING:

        @overload
        def __get__(self, instance: None, owner: type) -> Row[P]: ...
        @overload
        def __get__(self, instance: Operand, owner: type) -> Callable[P, Value]: ...
        @overload
        def __get__(self, instance: Notes[AnswerT], owner: type) -> Callable[Concatenate[Any, P], AnswerT]: ...
        def __get__(self, instance: Any, owner: type) -> Any: ...


def change(
    number: int, *, reads_out: bool = False, functions: Mapping[str, tuple[str, ...]] | None = None
) -> Callable[[Callable[Concatenate[Any, P], None]], ChangeRow[P]]:
    """Make a row of a method of Operations that writes to the vector that it is called on."""
    return lambda method: ChangeRow(method, number, reads_out=reads_out, functions=functions)


def reduction(
    number: int, take: Callable[[Any, bool], Any], *, of: str = ""
) -> Callable[[Callable[Concatenate[Any, P], Value]], ReductionRow[P, Value]]:
    """Make a row of a method of Operations that answers. of: the kind that finds it, if it is another method's."""
    return lambda method: ReductionRow(method, number, take=take, kind_name=of)
