"""The store of vectors in C, and exact sums: checked entries. What takes long runs without the GIL; users' functions have it."""

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.stdint cimport int64_t, intptr_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset


cdef extern from "content.h" nogil:
    ctypedef struct psd_content:
        pass
    void psd_content_add(psd_content *, const void *, size_t) noexcept
    uint64_t psd_content_check(const psd_content *) noexcept

cdef extern from "vector.h" nogil:
    enum: PSD_V_REGIONS
    enum: PSD_ENTRIES
    enum: PSD_ANSWER_MAX
    enum: PSD_EXACT_LIMBS
    enum: PSD_V_F32
    enum: PSD_STRIPE
    ctypedef struct psd_exact:
        int64_t limbs[70]
        uint64_t flags
    ctypedef struct psd_vector_entry:
        uint64_t sequence, bytes, check
    ctypedef struct psd_vector_session:
        uint64_t session, check
        psd_vector_entry entries[9]
    ctypedef struct psd_vector_record:
        uint64_t content, slot, session, sequence
    ctypedef struct psd_vector_snapshot:
        int is_active, is_failed
        char ***saved
    ctypedef struct psd_vectors:
        char *base
        uint64_t at[6]
        uint64_t answers_max, operands_max, answer_bytes
        uint64_t *commit
        uint64_t *applied
        char *record
        uint64_t record_bytes, capacity
        char **bases
        uint64_t *elements
        uint32_t *dtypes
        void **current
        uint8_t *touched
        int (*apply)(void *, uint64_t, const void *const *, void *, intptr_t) noexcept
        void (*on_store)(void *, const char *) noexcept
        void *context
        psd_vector_snapshot snapshot
    void psd_exact_add(psd_exact *, double) noexcept
    void psd_exact_carry(psd_exact *) noexcept
    void psd_vectors_plan(psd_vectors *, uint64_t, uint64_t *) noexcept
    void psd_vectors_attach(psd_vectors *) noexcept
    psd_vector_session *psd_vector_session_at(const psd_vectors *, uint64_t) noexcept
    char *psd_vector_answer_at(const psd_vectors *, uint64_t, uint64_t) noexcept
    const char *psd_vectors_problem(psd_vectors *) noexcept
    uint64_t psd_unsealed(uint64_t) noexcept
    void psd_vector_store_check(uint64_t *, uint64_t) noexcept
    uint64_t psd_vector_checks_at(uint64_t, uint32_t) noexcept
    void psd_vector_checks_of_zeros(uint64_t, uint64_t, uint32_t, uint64_t *) noexcept
    uint64_t psd_vector_damaged(const psd_vectors *, uint64_t) noexcept
    int psd_vectors_try(psd_vectors *, const psd_vector_record *) noexcept
    void psd_vector_write(psd_vectors *, uint64_t, const void *, uint64_t, uint64_t *, psd_content *) noexcept
    void psd_vectors_commit(psd_vectors *) noexcept
    void psd_vectors_finish(psd_vectors *) noexcept
    uint64_t psd_vectors_answer(psd_vectors *, const psd_vector_record *, char *) noexcept
    void psd_vectors_applied(psd_vectors *) noexcept
    int psd_vector_snapshot_begin(psd_vectors *) noexcept
    void psd_vector_snapshot_copy(psd_vectors *, uint32_t, uint64_t, uint64_t, char *) noexcept
    void psd_vector_snapshot_end(psd_vectors *) noexcept

ANSWER_MAX = PSD_ANSWER_MAX
ENTRIES = PSD_ENTRIES


def exact_sum(const double[::1] values not None):
    """Sum of the finite numbers, an integer in units of 2**-1074, and flags. 1: there was NaN, 2: infinity, 4: minus infinity."""
    cdef psd_exact exact
    cdef intptr_t i
    memset(&exact, 0, sizeof(exact))
    with nogil:
        for i in range(values.shape[0]):
            psd_exact_add(&exact, values[i])
            if i & 0xFFFFF == 0xFFFFF:
                psd_exact_carry(&exact)
    psd_exact_carry(&exact)
    return sum(exact.limbs[i] << 32 * i for i in range(PSD_EXACT_LIMBS)), exact.flags


def file_bytes(uint64_t elements, uint32_t dtype):
    """Size of a vector's file, and in it the position of the stripes' checks."""
    at = psd_vector_checks_at(elements, dtype)
    return at + (elements + PSD_STRIPE - 1) // PSD_STRIPE * 8, at


def checks_of_zeros(uint64_t number, uint64_t elements, uint32_t dtype):
    """Checks of the stripes of a vector that is all zeros."""
    checks = bytearray((elements + PSD_STRIPE - 1) // PSD_STRIPE * 8)
    cdef char *room = checks
    psd_vector_checks_of_zeros(number, elements, dtype, <uint64_t *>room)
    return bytes(checks)


cdef class _Mapping:
    """Bytes of a buffer, which lives as long as this does."""

    cdef Py_buffer view

    def __cinit__(self, object owner):
        PyObject_GetBuffer(owner, &self.view, PyBUF_SIMPLE | PyBUF_WRITABLE)

    def __dealloc__(self):
        PyBuffer_Release(&self.view)


cdef void _note(void *context, const char *name) noexcept with gil:
    (<Vectors>context).on_store(name.decode())


cdef int _apply(void *context, uint64_t op, const void *const *inputs, void *out, intptr_t n) noexcept with gil:
    cdef Vectors vectors = <Vectors>context
    try:
        vectors.compute(op, inputs, <char *>out, n)
    except BaseException as error:
        vectors.error = error
        return 1
    return 0


cdef class Vectors:
    """The log, the record and the vectors of a store. One thread at a time."""

    cdef psd_vectors vectors
    cdef uint64_t sizes[6]
    cdef object on_store, log, record, function, error
    cdef dict held
    cdef uint64_t senders

    def __cinit__(self, *, uint64_t answers_max, uint64_t operands_max, uint64_t senders, uint64_t capacity, on_store=None):
        cdef psd_vectors *t = &self.vectors
        t.answers_max, t.operands_max, t.capacity, self.senders = answers_max, operands_max, capacity, senders
        psd_vectors_plan(t, senders, self.sizes)
        self.held = {}
        t.bases = <char **>calloc(capacity, sizeof(char *))
        t.elements = <uint64_t *>calloc(capacity, 8)
        t.dtypes = <uint32_t *>calloc(capacity, 4)
        t.current = <void **>calloc(operands_max + 1, sizeof(void *))
        t.touched = <uint8_t *>calloc(operands_max + 1, 1)
        if t.bases == NULL or t.elements == NULL or t.dtypes == NULL or t.current == NULL or t.touched == NULL:
            raise MemoryError("no memory for a store of vectors")
        t.context, t.apply = <void *>self, _apply
        if on_store is not None:
            self.on_store = on_store
            t.on_store = _note

    def __dealloc__(self):
        psd_vector_snapshot_end(&self.vectors)
        free(self.vectors.bases)
        free(self.vectors.elements)
        free(self.vectors.dtypes)
        free(self.vectors.current)
        free(self.vectors.touched)

    @property
    def regions(self):
        """Start and size in bytes of each region of the log."""
        return [(self.vectors.at[i], self.sizes[i]) for i in range(PSD_V_REGIONS)]

    @property
    def answer_bytes(self):
        """Distance between the answers of two entries."""
        return self.vectors.answer_bytes

    def attach_log(self, object mapping):
        """Take over the mapping of the log."""
        cdef _Mapping held = _Mapping(mapping)
        assert <uint64_t>held.view.len >= self.vectors.at[PSD_V_REGIONS - 1] + self.sizes[PSD_V_REGIONS - 1]
        self.log = held
        self.vectors.base = <char *>held.view.buf
        psd_vectors_attach(&self.vectors)

    def attach_record(self, object mapping):
        """Take over the mapping of the record."""
        cdef _Mapping held = _Mapping(mapping)
        self.record = held
        self.vectors.record, self.vectors.record_bytes = <char *>held.view.buf, held.view.len

    def attach_vector(self, uint32_t number, object mapping, uint64_t elements, uint32_t dtype):
        """Take over the elements of a vector, and their checks."""
        cdef _Mapping held = _Mapping(mapping)
        assert number < self.vectors.capacity and <uint64_t>held.view.len >= file_bytes(elements, dtype)[0]
        self.held[number] = held
        self.vectors.bases[number], self.vectors.elements[number], self.vectors.dtypes[number] = <char *>held.view.buf, elements, dtype

    def detach_vector(self, uint32_t number):
        """Forget a vector."""
        self.vectors.bases[number] = NULL
        del self.held[number]

    @property
    def commit(self):
        """Number of the latest batch."""
        return psd_unsealed(self.vectors.commit[0])

    @property
    def applied(self):
        """Number of the latest batch that is complete."""
        return psd_unsealed(self.vectors.applied[0])

    def problem(self):
        """The problem of the log, or of the record of a batch that is not complete, or None."""
        cdef const char *problem
        with nogil:
            problem = psd_vectors_problem(&self.vectors)
        return None if problem == NULL else problem.decode()

    def damaged(self, uint32_t number):
        """The first stripe of a vector that does not have its check, or None."""
        assert number < self.vectors.capacity and self.vectors.bases[number] != NULL
        cdef uint64_t stripe
        with nogil:
            stripe = psd_vector_damaged(&self.vectors, number)
        return stripe if stripe * PSD_STRIPE < self.vectors.elements[number] else None

    cdef compute(self, uint64_t op, const void *const *inputs, char *out, intptr_t n):
        """Call a user's function on copies, so that it may keep them."""
        def block(intptr_t i, intptr_t nbytes):
            return PyBytes_FromStringAndSize(<const char *>inputs[i], nbytes)
        cdef const uint8_t[::1] result = self.function(op, n, block)
        memcpy(out, &result[0], result.shape[0])

    def run_apart(self, uint8_t[::1] record not None):
        """Run a batch that changes nothing; `answer` has its answers."""
        cdef psd_vector_record *head = <psd_vector_record *>&record[0]
        with nogil:
            psd_vectors_try(&self.vectors, head)

    def try_record(self, function):
        """Compute what users' functions make of the record's batch."""
        cdef int status
        self.function, self.error = function, None
        with nogil:
            status = psd_vectors_try(&self.vectors, <psd_vector_record *>self.vectors.record)
        self.function = None
        if status != 0:
            error, self.error = self.error, None
            raise error

    def write_record(self, const uint8_t[::1] head not None, list parts, uint64_t size, *, bint is_complete):
        """Write the record.

        Args:
            parts: what comes behind the head: the positions, growing, and arrays. is_complete: users' functions bring nothing.
        """
        cdef psd_vectors *t = &self.vectors
        cdef psd_vector_record *record = <psd_vector_record *>t.record
        cdef uint64_t end = head.shape[0], checked = end, at
        cdef const uint8_t[::1] part
        cdef psd_content content
        assert end <= size <= t.record_bytes
        memset(&content, 0, sizeof(content))
        memcpy(t.record, &head[0], end)
        for at, array in parts:
            part = array.reshape(-1).view("uint8")
            assert end <= at <= size and <uint64_t>part.shape[0] <= size - at
            memset(t.record + end, 0, at - end)
            end = at + part.shape[0]
            if at < end:
                with nogil:
                    psd_vector_write(t, at, &part[0], end - at, &checked, &content)
        if is_complete:
            memset(t.record + end, 0, size - end)
            psd_content_add(&content, t.record + checked, size - checked)
            record.content = psd_content_check(&content)

    def commit_record(self):
        """Let what the record says take place."""
        with nogil:
            psd_vectors_commit(&self.vectors)

    def finish(self):
        """Do what is left of the record's batch."""
        with nogil:
            psd_vectors_finish(&self.vectors)

    def answer(self, uint8_t[::1] record=None):
        """Keep and return the answers of a batch that has run, the record's by default."""
        cdef psd_vector_record *head = <psd_vector_record *>(self.vectors.record if record is None else <char *>&record[0])
        cdef char *room = NULL
        cdef uint64_t nbytes
        if head.session:
            psd_vectors_answer(&self.vectors, head, NULL)
            return self.kept(head.slot, head.sequence)
        answers = bytearray(self.vectors.answer_bytes)
        room = answers
        nbytes = psd_vectors_answer(&self.vectors, head, room)
        return bytes(answers[:nbytes])

    def set_applied(self):
        """Note that the record's batch is complete."""
        psd_vectors_applied(&self.vectors)

    def sessions(self):
        """The session of each slot, 0 for none."""
        cdef uint64_t slot
        cdef psd_vector_session *session
        found = []
        for slot in range(self.senders):
            session = psd_vector_session_at(&self.vectors, slot)
            found.append(session.session if session.check else 0)
        return found

    def sequences(self, uint64_t slot):
        """Sequence numbers in the entries of a slot."""
        assert slot < self.senders
        cdef psd_vector_session *session = psd_vector_session_at(&self.vectors, slot)
        return [session.entries[i].sequence if session.entries[i].check else 0 for i in range(PSD_ENTRIES)]

    def kept(self, uint64_t slot, uint64_t sequence):
        """The answers in an entry."""
        cdef psd_vector_session *session = psd_vector_session_at(&self.vectors, slot)
        assert slot < self.senders and session.entries[sequence % PSD_ENTRIES].sequence == sequence
        return PyBytes_FromStringAndSize(
            psd_vector_answer_at(&self.vectors, slot, sequence), session.entries[sequence % PSD_ENTRIES].bytes
        )

    def clear_session(self, uint64_t slot):
        """Give a slot to nobody."""
        cdef psd_vector_session *session = psd_vector_session_at(&self.vectors, slot)
        assert slot < self.senders
        psd_vector_store_check(&session.check, 0)
        memset(session, 0, sizeof(psd_vector_session))

    def begin_snapshot(self):
        """Begin a snapshot of all vectors as they are."""
        assert not self.vectors.snapshot.is_active
        if psd_vector_snapshot_begin(&self.vectors) != 0:
            raise MemoryError("no memory for a snapshot of vectors")

    def copy_of_snapshot(self, uint32_t number, uint64_t first, uint64_t count, uint8_t[::1] out not None):
        """Copy stripes of a vector as they were when the snapshot began."""
        assert self.vectors.snapshot.is_active and number < self.vectors.capacity and self.vectors.snapshot.saved[number] != NULL
        assert (first + count) * PSD_STRIPE < self.vectors.elements[number] + PSD_STRIPE
        if self.vectors.snapshot.is_failed:
            raise MemoryError("no memory to save vectors for a snapshot")
        with nogil:
            psd_vector_snapshot_copy(&self.vectors, number, first, count, <char *>&out[0])

    def end_snapshot(self):
        """End the snapshot, and free its memory."""
        psd_vector_snapshot_end(&self.vectors)
