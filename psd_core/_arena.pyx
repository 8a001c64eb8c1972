"""The block store's small C part: words in shared memory that are stored atomically and in order, and checksums.

This module owns every check that keeps an access within its buffer. It knows nothing of the arena's format.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_FillInfo, PyBuffer_Release, PyObject_GetBuffer
from cpython.exc cimport PyErr_SetFromErrno
from libc.stdint cimport int64_t, uint64_t, uintptr_t
from libc.string cimport memcpy, memset


cdef extern from "arena.h" nogil:
    uint64_t psd_load_acquire(const uint64_t *) noexcept
    void psd_store_release(uint64_t *, uint64_t) noexcept
    uint64_t psd_checksum(const void *, size_t) noexcept
    enum:
        PSD_LARGE_PAGE
    int psd_populate(void *, size_t) noexcept
    void *psd_map_large(int, size_t, int) noexcept
    int psd_make_large(void *) noexcept
    int munmap(void *, size_t) noexcept
    int psd_punch_hole(int, int64_t, int64_t) noexcept


cdef extern from "content.h" nogil:
    ctypedef struct psd_page_sums:
        uint64_t nbytes
    void psd_page_add(psd_page_sums *, const void *, size_t) noexcept
    uint64_t psd_page_check(const psd_page_sums *) noexcept


LARGE_PAGE_BYTES = PSD_LARGE_PAGE
SUMS_BYTES = sizeof(psd_page_sums)
cdef enum:
    _LONG = 32768  # words whose checksum takes as long as giving up the GIL is worth


cdef class LargeMap:
    """A file mapped shared, and for writing unless said otherwise, in a way that large pages can hold it: a buffer. Unmapped when nobody
    refers to it any more."""

    cdef void *start
    cdef Py_ssize_t nbytes
    cdef bint is_read_only

    def __cinit__(self, int fd, Py_ssize_t nbytes, *, bint is_read_only=False):
        assert nbytes > 0
        self.start = psd_map_large(fd, nbytes, is_read_only)
        if self.start == NULL:
            PyErr_SetFromErrno(OSError)
        self.nbytes = nbytes
        self.is_read_only = is_read_only

    def __dealloc__(self):
        if self.start != NULL:
            munmap(self.start, self.nbytes)

    def __getbuffer__(self, Py_buffer *view, int flags):
        PyBuffer_FillInfo(view, self, self.start, self.nbytes, self.is_read_only, flags)

    def make_large(self, Py_ssize_t start, Py_ssize_t nbytes):
        """Have large pages hold a range, and what is beside it in the first of them, without the GIL, as far as the system can. The range must
        have memory. Its last part stays as it is if it fills no large page."""
        if start < 0 or nbytes < 0 or start > self.nbytes or nbytes > self.nbytes - start:
            raise IndexError(f"bytes {start} to {start + nbytes} of {self.nbytes}")
        cdef Py_ssize_t at = start - start % PSD_LARGE_PAGE
        with nogil:
            while at + PSD_LARGE_PAGE <= start + nbytes and psd_make_large(<char *>self.start + at) == 0:
                at += PSD_LARGE_PAGE


cdef class Words:
    """`count` uint64 words of a writable buffer, from byte `start`: a buffer of their bytes. Keeps the first one alive."""

    cdef Py_buffer view
    cdef uint64_t *words
    cdef readonly Py_ssize_t count

    def __cinit__(self, object buffer, Py_ssize_t start, Py_ssize_t count):
        PyObject_GetBuffer(buffer, &self.view, PyBUF_SIMPLE | PyBUF_WRITABLE)
        if start < 0 or count < 0 or start > self.view.len or count > (self.view.len - start) // 8:
            raise IndexError(f"{count} words from byte {start} of a buffer of {self.view.len} bytes")
        self.words = <uint64_t *>(<char *>self.view.buf + start)
        if <uintptr_t>self.words % 8 != 0:
            raise ValueError(f"start: expected an address that is a multiple of 8, got byte {start}")
        self.count = count

    def __dealloc__(self):
        PyBuffer_Release(&self.view)

    cdef int check(self, Py_ssize_t first, Py_ssize_t count) except -1:
        if first < 0 or count < 0 or first > self.count or count > self.count - first:
            raise IndexError(f"words {first} to {first + count} of {self.count}")
        return 0

    def load(self, Py_ssize_t index):
        """Return a word; what was stored before it is visible afterwards (acquire)."""
        self.check(index, 1)
        return psd_load_acquire(&self.words[index])

    def store(self, Py_ssize_t index, uint64_t value):
        """Set a word at once; whoever sees it sees all that was stored before (fence and release)."""
        self.check(index, 1)
        psd_store_release(&self.words[index], value)

    def write(self, Py_ssize_t first, *values):
        """Set words in no particular order."""
        self.check(first, len(values))
        cdef Py_ssize_t i
        for i in range(len(values)):
            self.words[first + i] = values[i]

    def checksum(self, Py_ssize_t first, Py_ssize_t count):
        """Return the 64-bit checksum of `count` words."""
        self.check(first, count)
        return psd_checksum(&self.words[first], count)

    def __getbuffer__(self, Py_buffer *view, int flags):
        PyBuffer_FillInfo(view, self, self.words, 8 * self.count, 0, flags)

    def content(self):
        """Return the checksum of all words as a `Content` has it, without the GIL if they are many."""
        cdef psd_page_sums sums
        memset(&sums, 0, sizeof(sums))
        if self.count < _LONG:
            psd_page_add(&sums, self.words, 8 * self.count)
        else:
            with nogil:
                psd_page_add(&sums, self.words, 8 * self.count)
        return psd_page_check(&sums)


cdef class Content:
    """The checksum of what a page holds, computed piece by piece: of the same bytes in other pieces it may be
    another.

    Goes on from what step_block has put into `sums`, SUMS_BYTES, if it is given. `nbytes` says how many bytes are in it."""

    cdef psd_page_sums sums

    def __cinit__(self, const unsigned char[::1] sums=None):
        memset(&self.sums, 0, sizeof(self.sums))
        if sums is not None:
            if sums.shape[0] != sizeof(self.sums):
                raise ValueError(f"sums: expected {sizeof(self.sums)} bytes, got {sums.shape[0]}")
            memcpy(&self.sums, &sums[0], sizeof(self.sums))

    @property
    def nbytes(self):
        return self.sums.nbytes

    def add(self, const unsigned char[::1] data not None):
        """Go on with more bytes, without the GIL if they are many."""
        cdef size_t nbytes = data.shape[0]
        if nbytes == 0:
            return
        if nbytes < 8 * _LONG:
            psd_page_add(&self.sums, &data[0], nbytes)
        else:
            with nogil:
                psd_page_add(&self.sums, &data[0], nbytes)

    def check(self):
        """Return the checksum of all that was added; it is never 0."""
        return psd_page_check(&self.sums)


def checksum(const unsigned char[::1] data not None):
    """Return the 64-bit checksum of a buffer whose length is a multiple of 8 bytes."""
    if data.shape[0] % 8 != 0:
        raise ValueError(f"data: expected a multiple of 8 bytes, got {data.shape[0]}")
    return psd_checksum(&data[0] if data.shape[0] else NULL, data.shape[0] // 8)


def populate(object buffer, Py_ssize_t start, Py_ssize_t nbytes):
    """Map a range of a shared mapping for writing, without the GIL. Returns 0 or an errno."""
    cdef Words words = Words(buffer, start, nbytes // 8)
    cdef int status
    with nogil:
        status = psd_populate(words.words, nbytes)
    return status


def punch_hole(int fd, int64_t start, int64_t nbytes):
    """Give a range of a file back to the file system, without the GIL. Returns 0 or an errno."""
    cdef int status
    with nogil:
        status = psd_punch_hole(fd, start, nbytes)
    return status
