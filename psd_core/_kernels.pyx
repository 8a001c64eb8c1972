"""Checked entries to the C kernels: buffers in, GIL released, nothing kept.

This module owns every check that memory safety needs, so that no caller can make a kernel read or write out of bounds:
element type, byte order, dimensions, contiguity, alignment, writability, length, overlap, segment ends. It knows
no rule's defaults or meaning; those are in ``rules.py``. ``psd_core/__init__.py`` says what all of its functions promise.

Arrays come through the C buffer protocol rather than as typed memoryviews: the same checks at a fraction of the cost (a
step takes ten arrays), errors that name the argument, and a check of alignment, which memoryviews lack.
"""

from cpython.buffer cimport PyBUF_C_CONTIGUOUS, PyBUF_FORMAT, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport intptr_t, uint8_t, uint32_t, uint64_t, uintptr_t
from libc.string cimport memset

from psd_core._kernels_c cimport dtype_of, psd_dtype, psd_first_nonfinite


cdef extern from "kernels.h" nogil:
    ctypedef struct psd_page_sums:
        pass
    enum:
        PSD_RULES
        PSD_RULES_CHECKSUM
        PSD_FLAGS_MAX
        PSD_SCALARS_MAX
        PSD_SLOTS_MAX
        PSD_LIMBS
    ctypedef struct psd_hyper:
        uint8_t flags[PSD_FLAGS_MAX]
        double scalars[PSD_SCALARS_MAX]
    ctypedef struct psd_arrays:
        const void *param_in
        void *param_out
        const void *slots_in[PSD_SLOTS_MAX]
        void *slots_out[PSD_SLOTS_MAX]
        const void *acc
        const void *grad
        double weight
        double scale
        psd_dtype grad_dtype
        psd_page_sums *sums
    ctypedef struct psd_segments:
        intptr_t count
        const uint32_t *ends
        const uint8_t *touched
        const uint64_t *steps_in
        uint64_t *steps_out
    void psd_accumulate(psd_dtype, void *acc, const void *grad, double weight, intptr_t n) noexcept
    void psd_scaled_copy(psd_dtype, void *out, const void *grad, double weight, intptr_t n) noexcept
    void psd_weigh_segments(
        psd_dtype, void *out, const void *grad, intptr_t count, const uint32_t *ends, const double *weights, int add
    ) noexcept
    void psd_widen(psd_dtype, float *out, const void *half, intptr_t n) noexcept
    int psd_add_squares(psd_dtype, uint64_t *limbs, const void *x, intptr_t n, intptr_t offset) noexcept
    int psd_add_products(
        psd_dtype, uint64_t *plus, uint64_t *minus, const void *x, const void *y, intptr_t n, intptr_t offset
    ) noexcept
    void psd_step_block(psd_dtype, int rule, const psd_arrays *, const psd_hyper *, const psd_segments *) noexcept


RULES_CHECKSUM = <uint32_t>PSD_RULES_CHECKSUM  # of the table that the kernels were built with

cdef enum:
    BUFFERS_MAX = 9 + 2 * PSD_SLOTS_MAX  # param and slots in and out, acc, grad, four segment arrays, sums
    NO_TWIN = -1

# Element types by the letter that the buffer protocol uses; a bfloat16 has none and comes as its bits, an "H". Three are ours:
# "r" stands for f or d, "g" for f, e or H (what may be a gradient beside f), and "x" for any of them.
_TYPE_NAMES = {
    "f": "float32",
    "d": "float64",
    "r": "float32 or float64",
    "g": "float32, float16 or uint16 (bfloat16)",
    "x": "float32, float64, float16 or uint16 (bfloat16)",
    "B": "uint8",
    "I": "uint32",
    "Q": "uint64",
}


class InvalidArray(ValueError):
    """An argument is not the array that a kernel needs: the message names it, what was expected and what came."""

    __module__ = "psd_core"


cdef class _Borrow:
    """The arrays of one call, given back when the call ends in any way."""

    cdef Py_buffer views[BUFFERS_MAX]
    cdef int twins[BUFFERS_MAX]
    cdef int count
    cdef list names

    def __cinit__(self):
        self.names = []

    def __dealloc__(self):
        cdef int i
        for i in range(self.count):
            PyBuffer_Release(&self.views[i])

    cdef Py_buffer *take(self, str name, object array, char letter, bint writable, int twin=NO_TWIN) except NULL:
        """Return a view of a one-dimensional array of the type `letter`.

        `twin` is the index of the one buffer that a writable view may share its memory with, from the same start.
        """
        assert self.count < BUFFERS_MAX
        cdef Py_buffer *view = &self.views[self.count]
        try:
            PyObject_GetBuffer(array, view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (PyBUF_WRITABLE if writable else 0))
        except (BufferError, TypeError, ValueError) as error:
            raise _invalid(name, array, letter, writable, str(error)) from None
        self.twins[self.count] = twin if writable else self.count
        self.count += 1
        self.names.append(name)
        if view.ndim != 1:
            raise _invalid(name, array, letter, writable, f"{view.ndim} dimensions")
        # Alignment first: NumPy's format of a misaligned array is not the plain letter of its type.
        if view.len > 0 and view.itemsize in (2, 4, 8) and <uintptr_t>view.buf % <uintptr_t>view.itemsize != 0:
            raise _invalid(name, array, letter, writable, "misaligned memory")
        if not _is_of_type(view, letter):
            raise _invalid(name, array, letter, writable, "wrong element type")
        return view

    cdef void *like(self, str name, object array, Py_buffer *model, bint writable, int twin=NO_TWIN) except? NULL:
        """Return the data of an array with the type and the length of `model`, which was taken before."""
        return self.as_long(name, self.take(name, array, model.format[0], writable, twin), model).buf

    cdef Py_buffer *gradient(self, object array, Py_buffer *model) except NULL:
        """Return a view of a gradient with the length of `model`, and with its type or, where that is float32, in half."""
        cdef char letter = model.format[0]
        return self.as_long("grad", self.take("grad", array, c"g" if letter == c"f" else letter, False), model)

    cdef Py_buffer *as_long(self, str name, Py_buffer *view, Py_buffer *model) except NULL:
        """Return `view` if it has the length of `model`."""
        if view.shape[0] != model.shape[0]:
            raise InvalidArray(
                f"{name}: expected length {model.shape[0]}, that of {self.names[model - &self.views[0]]}, got {view.shape[0]}"
            )
        return view

    cdef int check_overlap(self) except -1:
        """Refuse an output that shares memory with anything but, exactly, its twin: the same start and the same end."""
        cdef int i, j
        cdef Py_buffer *a
        cdef Py_buffer *b
        for i in range(self.count):
            if self.twins[i] == i:  # not an output
                continue
            for j in range(self.count):
                a, b = &self.views[i], &self.views[j]
                if j == i or (j == self.twins[i] and a.buf == b.buf and a.len == b.len):
                    continue
                if _overlap(a, b):
                    raise InvalidArray(f"{self.names[i]}: expected memory of its own, got some that overlaps {self.names[j]}")
        return 0


cdef inline bint _overlap(Py_buffer *a, Py_buffer *b) noexcept:
    if a.len == 0 or b.len == 0:
        return False
    return <uintptr_t>a.buf < <uintptr_t>b.buf + b.len and <uintptr_t>b.buf < <uintptr_t>a.buf + a.len


cdef bint _is_of_type(Py_buffer *view, char letter) noexcept:
    # Native byte order has no prefix. uint64 is "L" or "Q", uint32 "I" or "L", as the platform's long has it.
    if view.format == NULL or view.format[0] == 0 or view.format[1] != 0:
        return letter == c"B" and view.format == NULL
    cdef char got = view.format[0]
    if letter == c"r":
        return got == c"f" or got == c"d"
    if letter == c"g":
        return got == c"f" or got == c"e" or got == c"H"
    if letter == c"x":
        return got == c"f" or got == c"d" or got == c"e" or got == c"H"
    if letter == c"Q":
        return view.itemsize == 8 and (got == c"Q" or got == c"L")
    if letter == c"I":
        return view.itemsize == 4 and (got == c"I" or got == c"L")
    return got == letter


cdef inline psd_dtype _dtype(Py_buffer *view) noexcept nogil:
    return dtype_of(view.format[0])


cdef object _invalid(str name, object array, char letter, bint writable, str problem):
    got = f"{type(array).__name__} of {array.dtype}" if hasattr(array, "dtype") else type(array).__name__
    writable_ = "writable " if writable else ""
    expected = f"a {writable_}1-D C-contiguous aligned {_TYPE_NAMES[chr(letter)]} array"
    return InvalidArray(f"{name}: expected {expected}, got {got}: {problem}")


def accumulate(object acc, object grad, double weight=1.0):
    """Add ``weight * grad`` to ``acc`` in place.

    Args:
        acc: (n,) float32|float64, writable. Updated.
        grad: (n,) same type, or float16|uint16 beside float32. May be ``acc`` itself; otherwise must not overlap it.
        weight: rounded to the arrays' type; with weight 1 the gradient itself is added.

    Raises:
        InvalidArray: type, shape, layout, alignment, length or overlap; ``acc`` is untouched.

    Cost: O(n), no allocation, GIL released. Two roundings per element (product, sum).
    """
    cdef _Borrow borrow = _Borrow()
    cdef Py_buffer *to = borrow.take("acc", acc, c"r", True, 1)
    cdef Py_buffer *source = borrow.gradient(grad, to)
    borrow.check_overlap()
    with nogil:
        psd_accumulate(_dtype(source), to.buf, source.buf, weight, to.shape[0])


def scaled_copy(object out, object grad, double weight=1.0):
    """Set ``out`` to ``weight * grad``: the first contribution of a round, so ``out`` need not be zeroed first.

    Args:
        out: (n,) float32|float64, writable. Overwritten.
        grad: (n,) same type, or float16|uint16 beside float32. May be ``out`` itself; otherwise must not overlap it.
        weight: rounded to the arrays' type.

    Raises:
        InvalidArray: type, shape, layout, alignment, length or overlap; ``out`` is untouched.

    Cost: O(n), no allocation, GIL released.
    """
    cdef _Borrow borrow = _Borrow()
    cdef Py_buffer *to = borrow.take("out", out, c"r", True, 1)
    cdef Py_buffer *source = borrow.gradient(grad, to)
    borrow.check_overlap()
    with nogil:
        psd_scaled_copy(_dtype(source), to.buf, source.buf, weight, to.shape[0])


def weigh_segments(object out, object grad, object segment_ends, object weights, *, bint add):
    """Set ``out`` to ``grad``, or add it to ``out``, each segment multiplied by a weight of its own.

    Args:
        out: (n,) float32|float64, writable.
        grad: (n,) same type, or float16|uint16 beside float32. May be ``out`` itself; otherwise must not overlap it.
        segment_ends: (k,) uint32, never falling, where each segment ends; the last is n.
        weights: (k,) float64, rounded to the arrays' type.
        add: True: as ``accumulate`` of each segment. False: as ``scaled_copy``.

    Raises:
        InvalidArray: type, shape, layout, alignment, length, overlap or segment ends; ``out`` is untouched.

    Cost: O(n + k), no allocation, GIL released.
    """
    cdef _Borrow borrow = _Borrow()
    cdef Py_buffer *to = borrow.take("out", out, c"r", True, 1)
    cdef Py_buffer *source = borrow.gradient(grad, to)
    cdef Py_buffer *ends = borrow.take("segment_ends", segment_ends, c"I", False)
    cdef Py_buffer *each = borrow.take("weights", weights, c"d", False)
    cdef psd_segments segments
    if each.shape[0] != ends.shape[0]:
        raise InvalidArray(f"weights: expected length {ends.shape[0]}, that of segment_ends, got {each.shape[0]}")
    segments.count, segments.ends = ends.shape[0], <const uint32_t *>ends.buf
    _check_ends(&segments, to.shape[0], "out")
    borrow.check_overlap()
    with nogil:
        psd_weigh_segments(
            _dtype(source), to.buf, source.buf, segments.count, segments.ends, <const double *>each.buf, add
        )


def is_half(object x):
    """True if an array of any of the types is in half precision."""
    cdef _Borrow borrow = _Borrow()
    return borrow.take("x", x, c"x", False).itemsize == 2


def widen(object out, object x):
    """Set `out` to the numbers of `x`, for which `is_half` holds."""
    cdef _Borrow borrow = _Borrow()
    cdef Py_buffer *to = borrow.take("out", out, c"f", True)
    cdef Py_buffer *source = borrow.as_long("x", borrow.take("x", x, c"x", False), to)
    assert source.itemsize == 2
    borrow.check_overlap()
    with nogil:
        psd_widen(_dtype(source), <float *>to.buf, source.buf, to.shape[0])


def first_nonfinite(object x):
    """Return the index of the first NaN or infinity in ``x``, or -1 if all numbers are finite.

    Args:
        x: (n,) float32|float64|float16|uint16.

    Raises:
        InvalidArray: type, shape, layout or alignment.

    Cost: O(index of the answer), no allocation, GIL released; tests the exponent bits, 1 KiB at a time.
    """
    cdef _Borrow borrow = _Borrow()
    cdef Py_buffer *view = borrow.take("x", x, c"x", False)
    cdef intptr_t index
    with nogil:
        index = psd_first_nonfinite(_dtype(view), view.buf, view.shape[0])
    return index


def square_sum(object x, int offset, intptr_t width=0):
    cdef _Borrow borrow = _Borrow()
    cdef Py_buffer *view = borrow.take("x", x, c"x", False)
    cdef uint64_t limbs[PSD_LIMBS]
    cdef int is_finite = 1
    cdef intptr_t at = 0, n = view.shape[0], step = width if width > 0 else n
    assert step == 0 or n % step == 0
    memset(limbs, 0, sizeof(limbs))
    with nogil:
        while at < n:
            is_finite &= psd_add_squares(_dtype(view), limbs, <const char *>view.buf + at * view.itemsize, step, offset)
            at += step
    return _integer(limbs) if is_finite else None


cdef object _integer(const uint64_t *limbs):
    """The integer that carried limbs stand for."""
    cdef uint32_t words[PSD_LIMBS]
    cdef int i
    for i in range(PSD_LIMBS):
        words[i] = <uint32_t>limbs[i]
    return int.from_bytes((<char *>words)[: sizeof(words)], "little")


def product_sum(object x, object y, int offset):
    cdef _Borrow borrow = _Borrow()
    cdef Py_buffer *one = borrow.take("x", x, c"r", False)
    cdef const void *other = borrow.like("y", y, one, False)
    cdef uint64_t plus[PSD_LIMBS]
    cdef uint64_t minus[PSD_LIMBS]
    cdef int is_finite
    memset(plus, 0, sizeof(plus))
    memset(minus, 0, sizeof(minus))
    with nogil:
        is_finite = psd_add_products(_dtype(one), plus, minus, one.buf, other, one.shape[0], offset)
    return _integer(plus) - _integer(minus) if is_finite else None


def step_block(
    int rule, object param_in, object param_out, tuple slot_names, tuple slots_in, tuple slots_out, object acc, object grad,
    double weight, double scale, object segment_ends, object touched, object steps_in, object steps_out, tuple scalars,
    tuple flags, object sums,
):
    """Apply one update of a block from the input arrays to the output arrays."""
    cdef _Borrow borrow = _Borrow()
    cdef psd_arrays arrays
    cdef psd_hyper hyper
    cdef psd_segments segments
    cdef Py_buffer *model
    cdef Py_buffer *source
    cdef Py_buffer *ends
    cdef Py_buffer *place
    cdef int i
    assert len(slots_in) == len(slots_out) == len(slot_names) <= PSD_SLOTS_MAX
    assert 0 <= rule < PSD_RULES and len(scalars) <= PSD_SCALARS_MAX and len(flags) <= PSD_FLAGS_MAX
    memset(&arrays, 0, sizeof(arrays))
    memset(&hyper, 0, sizeof(hyper))
    for i in range(len(scalars)):
        hyper.scalars[i] = scalars[i]
    for i in range(len(flags)):
        hyper.flags[i] = flags[i]

    model = borrow.take("param_in", param_in, c"r", False)
    arrays.param_in = model.buf
    arrays.param_out = borrow.like("param_out", param_out, model, True, 0)
    for i in range(len(slots_in)):
        if slots_in[i] is None and slots_out[i] is None:
            continue
        arrays.slots_in[i] = borrow.like(slot_names[i] + "_in", slots_in[i], model, False)
        arrays.slots_out[i] = borrow.like(slot_names[i] + "_out", slots_out[i], model, True, borrow.count - 1)
    if acc is None and grad is None:
        raise InvalidArray("grad: expected an array where acc is None, got None")
    if acc is not None:
        arrays.acc = borrow.like("acc", acc, model, False)
    if grad is not None:
        source = borrow.gradient(grad, model)
        arrays.grad, arrays.grad_dtype = source.buf, _dtype(source)
    arrays.weight, arrays.scale = weight, scale

    ends = borrow.take("segment_ends", segment_ends, c"I", False)
    segments.count = ends.shape[0]
    segments.ends = <const uint32_t *>ends.buf
    segments.touched = <const uint8_t *>_segment_array(borrow, "touched", touched, c"B", False, ends)
    segments.steps_in = <const uint64_t *>_segment_array(borrow, "steps_in", steps_in, c"Q", False, ends)
    segments.steps_out = <uint64_t *>_segment_array(borrow, "steps_out", steps_out, c"Q", True, ends)
    _check_ends(&segments, model.shape[0], "param_in")
    if sums is not None:
        place = borrow.take("sums", sums, c"B", True)
        if place.len != sizeof(psd_page_sums) or <uintptr_t>place.buf % 8 != 0:
            raise InvalidArray(f"sums: expected {sizeof(psd_page_sums)} bytes from a multiple of 8, got {place.len}")
        arrays.sums = <psd_page_sums *>place.buf
    borrow.check_overlap()

    with nogil:
        psd_step_block(_dtype(model), rule, &arrays, &hyper, &segments)


cdef void *_segment_array(_Borrow borrow, str name, object array, char letter, bint writable, Py_buffer *ends) except? NULL:
    cdef Py_buffer *view = borrow.take(name, array, letter, writable, borrow.count - 1)
    if view.shape[0] != ends.shape[0]:
        raise InvalidArray(f"{name}: expected length {ends.shape[0]}, that of segment_ends, got {view.shape[0]}")
    return view.buf


cdef int _check_ends(psd_segments *segments, intptr_t n, str whole) except -1:
    cdef intptr_t i
    cdef uint32_t end = 0
    for i in range(segments.count):
        if segments.ends[i] < end:
            raise InvalidArray(f"segment_ends: expected ends that never fall, got {segments.ends[i]} after {end}")
        end = segments.ends[i]
    if end != n:
        raise InvalidArray(f"segment_ends: expected {n}, the length of {whole}, as the last end, got {end}")
    return 0
