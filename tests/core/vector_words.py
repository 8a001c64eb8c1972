"""Operations on vectors, as a store takes them: those of the table's rows by their methods' names, and the others."""

from psd_core.vector_operations import Operations, VectorOperation

fill, copy, scale, axpy, combine, random = (
    Operations.fill,
    Operations.copy,
    Operations.scale,
    Operations.axpy,
    Operations.combine,
    Operations.random,
)
dot, sum, norm2, min, max = Operations.dot, Operations.sum, Operations.norm2, Operations.min, Operations.max  # noqa: A001


def map(out, function, x, arguments=()):  # noqa: A001
    return Operations.map(out, function, *arguments, of=x)


def zip(out, function, x, y, arguments=()):  # noqa: A001
    return Operations.zip(out, function, y, *arguments, of=x)


def custom(out, function, x):
    return VectorOperation("custom", out, x, function=function)


def put(out, start, values):
    return VectorOperation("put", out, start=start, values=values)


def add(out, start, values):
    return VectorOperation("add", out, start=start, values=values)


def add_at(out, indices, values):
    return VectorOperation("add_at", out, places=indices, values=values)


def add_rows(out, rows, values):
    return VectorOperation("add_rows", out, places=rows, values=values)


def gram(x, y=()):
    return VectorOperation("gram", "", x, y)
