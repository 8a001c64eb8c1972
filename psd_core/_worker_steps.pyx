"""The worker's end of armed steps, csrc/worker_steps.h, over the caller's sockets and arrays.

This module owns every check that keeps an access within its buffer, and writes the heads of steps. It knows the layout of the
messages (step_frames.h), and not what sessions, clocks and versions mean, or whether a step may be made.
"""

from cpython.exc cimport PyErr_CheckSignals
from cpython.mem cimport PyMem_Calloc, PyMem_Free
from libc.errno cimport EINTR
from libc.stdint cimport intptr_t, uint32_t, uint64_t, uintptr_t
from libc.string cimport memcpy, memset

from psd_core._kernels_c cimport dtype_of, psd_dtype, psd_first_nonfinite


cdef extern from "step_frames.h" nogil:
    enum:
        PSD_STEP
        PSD_STEP_HAS_VERSIONS
        PSD_STEP_HAS_PRESENT
        PSD_ROWS_PRESENT
        PSD_STEP_ROWS_MAX
    ctypedef struct psd_step_rows_head:
        uint64_t pushed, pulled, pushed_at, pulled_at, flags
    ctypedef struct psd_step_prefix:
        uint32_t kind, head_bytes
        uint64_t payload_bytes
    ctypedef struct psd_step_head:
        uint64_t epoch, session, clock, since
        double weight
        uint32_t flags, place
    ctypedef struct psd_done_head:
        uint64_t clock
        uint32_t counted, duplicate

cdef extern from "worker_steps.h" nogil:
    cdef struct iovec:
        void *iov_base
        size_t iov_len
    ctypedef enum psd_step_state:
        PSD_STEP_UNSENT
        PSD_STEP_PENDING
        PSD_STEP_TAKEN
        PSD_STEP_REFUSED
        PSD_STEP_FOREIGN
        PSD_STEP_BROKEN
    ctypedef struct psd_worker_step:
        int fd
        iovec *out
        # `in` is a word of Python's
        iovec *in_ "in"
        int outs, ins
        size_t out_bytes, in_bytes
        uint64_t *versions
        const uint32_t *blocks
        size_t count
        psd_step_state state
        int error
        size_t sent, received, rest
    ctypedef struct psd_worker_lookout:
        int is_wanted
        uint32_t doubt, passing
    void psd_worker_step_begin(psd_worker_step *) noexcept
    int psd_worker_step_advance(psd_worker_step *) noexcept
    int psd_worker_steps_advance(psd_worker_step *, size_t, psd_worker_lookout *) noexcept
    void psd_worker_step_copy(const psd_worker_step *, char *) noexcept


UNSENT, PENDING, TAKEN = PSD_STEP_UNSENT, PSD_STEP_PENDING, PSD_STEP_TAKEN
REFUSED, FOREIGN, BROKEN = PSD_STEP_REFUSED, PSD_STEP_FOREIGN, PSD_STEP_BROKEN

cdef enum:
    PREFIX = sizeof(psd_step_prefix)
    HEAD = sizeof(psd_step_head)
    DONE = sizeof(psd_done_head)
    ROWS = sizeof(psd_step_rows_head)

ROWS_BYTES_MAX = PSD_STEP_ROWS_MAX  # of ids and numbers that travel with a step, and with its answer

ctypedef struct Looked:
    psd_dtype dtype
    const void *values
    intptr_t length

ctypedef struct Facts:
    uint64_t epoch
    uint32_t place
    size_t present_bytes, tables
    # Without rows: how many pieces there are of a step, and of its answer, and their bytes.
    int outs, ins
    size_t out_bytes, in_bytes


cdef class WorkerSteps:
    """The steps of one worker: small push_pulls, each made at several shards at a time. One thread at a time uses one shard.

    Args:
        shards: number of shards, which are known here by their places in that order.
        versions: of all blocks of the job by index, uint64: sent with each step, and what comes is written there.
        sends_versions: False: they are not sent. scalars: how many a step has.
        looks_out: look out for the answers before sleeping, as long as they mostly come in time (psd_worker_lookout).
        looked_at: arrays in which NaN and infinity are looked for: float32, float64, float16 or uint16 (bfloat16).
    """

    cdef psd_worker_step *steps
    cdef Facts *facts
    cdef Looked *looked
    cdef psd_worker_lookout lookout
    cdef size_t count, spaces, scalars
    cdef double *numbers
    cdef uint64_t[::1] versions
    cdef uint32_t flags
    cdef list kept  # what has memory that is used
    cdef list rows  # likewise, for each shard, in the next step or the one under way

    def __cinit__(
        self, size_t shards, *, uint64_t[::1] versions not None, bint sends_versions, size_t scalars, list looked_at not None,
        bint looks_out=False,
    ):
        cdef size_t i
        assert 0 < shards <= 1 << 16 and scalars <= 1 << 16 and versions.shape[0] > 0
        self.count, self.scalars, self.spaces = shards, scalars, len(looked_at)
        self.versions, self.flags, self.kept = versions, PSD_STEP_HAS_VERSIONS if sends_versions else 0, []
        self.rows = [None] * shards
        self.steps = <psd_worker_step *>PyMem_Calloc(shards, sizeof(psd_worker_step))
        self.facts = <Facts *>PyMem_Calloc(shards, sizeof(Facts))
        self.looked = <Looked *>PyMem_Calloc(self.spaces + 1, sizeof(Looked))
        self.numbers = <double *>PyMem_Calloc(scalars + 1, sizeof(double))
        if self.steps == NULL or self.facts == NULL or self.looked == NULL or self.numbers == NULL:
            raise MemoryError("no memory for steps")
        self.lookout.is_wanted = looks_out
        for i in range(shards):
            self.steps[i].fd = -1
        for i in range(self.spaces):
            self.looked[i] = self.looking_at(looked_at[i])

    def __dealloc__(self):
        cdef size_t i
        if self.steps != NULL:
            for i in range(self.count):
                PyMem_Free(self.steps[i].out)
                PyMem_Free(self.steps[i].in_)
        PyMem_Free(self.steps)
        PyMem_Free(self.facts)
        PyMem_Free(self.looked)
        PyMem_Free(self.numbers)

    cdef Looked looking_at(self, object array) except *:
        cdef Looked found
        cdef unsigned char[::1] memory
        cdef str letter = memoryview(array).format
        if letter not in ("f", "d", "e", "H"):
            raise ValueError(f"looked_at: elements of type {letter}")
        found.dtype = dtype_of(<char>ord(letter))
        found.values, found.length = NULL, 0
        if len(array):
            memory = memoryview(array).cast("B")
            self.kept.append(memory)
            found.values, found.length = &memory[0], len(array)
            assert <uintptr_t>found.values % <uintptr_t>memoryview(array).itemsize == 0
        return found

    cdef psd_worker_step *shard(self, size_t shard) except NULL:
        if shard >= self.count:
            raise IndexError(f"shard: {shard} of {self.count}")
        return &self.steps[shard]

    def lay_out(
        self, size_t shard, const uint32_t[::1] blocks not None, size_t head_bytes, uint32_t place, list gradients not None,
        list parameters not None, size_t tables=0,
    ):
        """Say what the steps of a shard are made of; returns the bytes of the payloads of STEP and DONE. Once for each shard.

        Args:
            blocks: the shard's, uint32, in the order of STEP and DONE; the last one is the tables' block, if the job has tables.
            head_bytes: of STEP. place: as in psd_step_head.
            gradients, parameters: arrays, one for each other block, that travel; empty: they do not. tables: how many there are.

        Raises:
            ValueError: these do not fit, or a head of such a step has another size.
        """
        cdef psd_worker_step *s = self.shard(shard)
        cdef unsigned char[::1] message, answer
        cdef psd_step_prefix prefix
        cdef size_t i, count = blocks.shape[0], fixed = HEAD + 8 * (count + self.scalars) + ROWS * tables
        assert tables <= 1 << 16
        assert s.out == NULL and s.in_ == NULL
        if head_bytes < fixed or head_bytes % 8 or head_bytes > 1 << 26 or count == 0:
            raise ValueError(f"head_bytes: {head_bytes} of {count} blocks and {self.scalars} scalars")
        for i in range(count):
            if blocks[i] >= <size_t>self.versions.shape[0]:
                raise ValueError(f"blocks: {blocks[i]} of {self.versions.shape[0]}")
        for arrays in (gradients, parameters):
            if arrays and <size_t>len(arrays) != count - (tables > 0):
                raise ValueError(f"arrays: {len(arrays)} of {count} blocks")
        s.out = <iovec *>PyMem_Calloc(1 + 2 * len(gradients) + 4 * tables, sizeof(iovec))
        s.in_ = <iovec *>PyMem_Calloc(1 + 2 * len(parameters) + 2 * tables, sizeof(iovec))
        if s.out == NULL or s.in_ == NULL:
            raise MemoryError("no memory for steps")
        message, answer = bytearray(PREFIX + head_bytes), bytearray(PREFIX + DONE + 8 * count)
        s.versions, s.blocks, s.count = &self.versions[0], &blocks[0], count
        self.kept += [blocks, message, answer]
        self.facts[shard].place, self.facts[shard].present_bytes, self.facts[shard].tables = place, head_bytes - fixed, tables
        s.outs = self.list_pieces(s.out, message, gradients, &s.out_bytes)
        s.ins = self.list_pieces(s.in_, answer, parameters, &s.in_bytes)
        prefix.kind, prefix.head_bytes, prefix.payload_bytes = PSD_STEP, <uint32_t>head_bytes, s.out_bytes - message.shape[0]
        memcpy(&message[0], &prefix, PREFIX)
        self.facts[shard].outs, self.facts[shard].out_bytes = s.outs, s.out_bytes
        self.facts[shard].ins, self.facts[shard].in_bytes = s.ins, s.in_bytes
        return s.out_bytes - message.shape[0], s.in_bytes - answer.shape[0]

    cdef int list_pieces(self, iovec *pieces, unsigned char[::1] front, list arrays, size_t *nbytes) except -1:
        """Fill in what travels: a front, and the arrays, each up to a multiple of 8 bytes; returns how many pieces."""
        cdef unsigned char[::1] memory
        # Each gap has its own: if what comes is no answer after all, every byte of it must be there.
        cdef unsigned char[::1] gaps = bytearray(8 * (len(arrays) + 1))
        cdef size_t left
        cdef int n = 1
        pieces[0].iov_base, pieces[0].iov_len = &front[0], front.shape[0]
        nbytes[0] = front.shape[0]
        self.kept.append(gaps)
        for array in arrays:
            memory = memoryview(array).cast("B")
            if not memory.shape[0]:
                raise ValueError("arrays: one is empty")
            self.kept.append(memory)
            nbytes[0] += memory.shape[0]
            if n > 1 and <char *>pieces[n - 1].iov_base + pieces[n - 1].iov_len == <char *>&memory[0]:
                pieces[n - 1].iov_len += memory.shape[0]
            else:
                pieces[n].iov_base, pieces[n].iov_len = &memory[0], memory.shape[0]
                n += 1
            left = -nbytes[0] % 8
            if left:
                pieces[n].iov_base, pieces[n].iov_len = &gaps[8 * (n // 2)], left
                n += 1
                nbytes[0] += left
        return n

    def give_rows(self, size_t shard, dict pushed not None, dict pulled not None):
        """Say which rows the next step of a shard pushes, and pulls, in a job with tables. Before each step.

        Args:
            pushed: by table ids (n,) uint64, their gradients (n, dim) float32, and where these lie in attached memory; 0: they
                travel. pulled: likewise, with memory for the rows.
        """
        cdef psd_worker_step *s = self.shard(shard)
        cdef Facts *facts = &self.facts[shard]
        cdef psd_step_rows_head *heads
        cdef uint64_t payload
        cdef size_t i
        assert s.out != NULL and s.state != PSD_STEP_PENDING
        heads = <psd_step_rows_head *>(<char *>s.out[0].iov_base + s.out[0].iov_len - ROWS * facts.tables)
        memset(heads, 0, ROWS * facts.tables)
        s.outs, s.out_bytes, s.ins, s.in_bytes = facts.outs, facts.out_bytes, facts.ins, facts.in_bytes
        self.rows[shard] = kept = []
        for table in (*pushed, *pulled):
            if not 0 <= table < <Py_ssize_t>facts.tables:
                raise ValueError(f"table: {table} of {facts.tables}")
        for i in range(facts.tables):
            if i in pushed:
                ids, values, heads[i].pushed_at = pushed[i]
                heads[i].pushed, heads[i].flags = self.check_rows(ids, values), PSD_ROWS_PRESENT
                self.add_piece(s.out, &s.outs, &s.out_bytes, ids, kept)
            if i in pulled:
                ids, values, heads[i].pulled_at = pulled[i]
                heads[i].pulled = self.check_rows(ids, values)
                assert not memoryview(values).readonly
                self.add_piece(s.out, &s.outs, &s.out_bytes, ids, kept)
        for i in range(facts.tables):
            if heads[i].pushed and not heads[i].pushed_at:
                self.add_piece(s.out, &s.outs, &s.out_bytes, pushed[i][1], kept)
            if heads[i].pulled and not heads[i].pulled_at:
                self.add_piece(s.in_, &s.ins, &s.in_bytes, pulled[i][1], kept)
        payload = s.out_bytes - s.out[0].iov_len
        memcpy(<char *>s.out[0].iov_base + 8, &payload, 8)

    cdef uint64_t check_rows(self, object ids, object values) except? 0:
        """The number of rows."""
        if memoryview(ids).format not in ("L", "Q") or memoryview(values).format != "f" or len(ids) != len(values):
            raise ValueError("rows: expected ids of uint64, and as many rows of float32")
        return len(ids)

    cdef int add_piece(self, iovec *pieces, int *count, size_t *nbytes, object array, list kept) except -1:
        """Add an array to what travels, up to a multiple of 8 bytes."""
        cdef const unsigned char[::1] memory
        cdef unsigned char[::1] gap
        cdef size_t left
        if not len(array):
            return 0
        memory = memoryview(array).cast("B")
        kept.append(memory)
        pieces[count[0]].iov_base, pieces[count[0]].iov_len = <void *>&memory[0], memory.shape[0]
        count[0] += 1
        nbytes[0] += memory.shape[0]
        left = -nbytes[0] % 8
        if left:
            gap = bytearray(8)
            kept.append(gap)
            pieces[count[0]].iov_base, pieces[count[0]].iov_len = &gap[0], left
            count[0] += 1
            nbytes[0] += left
        return 0

    def arm(self, size_t shard, int fd, uint64_t epoch):
        """Make the next steps of a shard over this socket, as of this epoch. One that was given up while under way is gone."""
        cdef psd_worker_step *s = self.shard(shard)
        s.fd, s.state = fd, PSD_STEP_UNSENT
        self.facts[shard].epoch = epoch

    def run(self, uint64_t session, uint64_t clock, uint64_t since, double weight, object scalars, list present):
        """Make the next step at all shards. True if all have taken it, and counted it in all blocks, and expect the next clock.

        False: for each shard `state` says what has become of it. None: nothing was sent, because a gradient is not finite, or
        the scalars are not as many as they should be.

        Args:
            scalars: a sequence for each group. present: for each shard the bytes of its blocks' masks; None: all is present.

        Raises what a signal's handler does; steps may be under way then.
        """
        cdef psd_step_head head
        cdef size_t i = 0
        cdef int why
        for group in scalars:
            for number in group:
                if i == self.scalars:
                    return None
                self.numbers[i] = number
                i += 1
        if i != self.scalars:
            return None
        for i in range(self.spaces):
            if psd_first_nonfinite(self.looked[i].dtype, self.looked[i].values, self.looked[i].length) >= 0:
                return None
        head.session, head.clock, head.since, head.weight = session, clock, since, weight
        for i in range(self.count):
            self.write(i, &head, None if present is None else present[i])
        while True:
            with nogil:
                why = psd_worker_steps_advance(self.steps, self.count, &self.lookout)
            if why != EINTR:
                break
            PyErr_CheckSignals()
        return why == 0 and self.is_plain(clock)

    cdef int write(self, size_t shard, psd_step_head *head, const unsigned char[::1] present) except -1:
        """Write the head of a shard's next step."""
        cdef psd_worker_step *s = &self.steps[shard]
        cdef char *at
        cdef size_t i
        if s.out == NULL or s.fd < 0:
            raise ValueError(f"shard: {shard} is not armed")
        at = <char *>s.out[0].iov_base + PREFIX
        head.epoch, head.place, head.flags = self.facts[shard].epoch, self.facts[shard].place, self.flags
        if present is not None:
            if <size_t>present.shape[0] != self.facts[shard].present_bytes:
                raise ValueError(f"present: {present.shape[0]} bytes of {self.facts[shard].present_bytes}")
            head.flags |= PSD_STEP_HAS_PRESENT
        memcpy(at, head, HEAD)
        at += HEAD
        if self.flags & PSD_STEP_HAS_VERSIONS:
            for i in range(s.count):
                memcpy(at + 8 * i, &self.versions[s.blocks[i]], 8)
        at += 8 * s.count
        memcpy(at, self.numbers, 8 * self.scalars)
        if present is not None and present.shape[0]:
            memcpy(at + 8 * self.scalars, &present[0], present.shape[0])
        psd_worker_step_begin(s)
        return 0

    cdef bint is_plain(self, uint64_t clock) noexcept:
        cdef psd_done_head done
        cdef size_t i
        for i in range(self.count):
            if self.steps[i].state != PSD_STEP_TAKEN:
                return False
            memcpy(&done, <char *>self.steps[i].in_[0].iov_base + PREFIX, DONE)
            if done.clock != clock + 1 or done.counted != self.steps[i].count:
                return False
        return True

    def advance(self, size_t shard):
        """Go on with a shard's step that is PENDING. True if it is not any more; False if the socket's timeout has passed."""
        cdef psd_worker_step *s = self.shard(shard)
        cdef int why
        while True:
            with nogil:
                why = psd_worker_step_advance(s)
            if why != EINTR:
                return why == 0
            PyErr_CheckSignals()

    @property
    def doubt(self):
        """Steps that slept at once since the last vain look, less those that were answered in time: psd_worker_lookout."""
        return self.lookout.doubt

    def state(self, size_t shard):
        """The fate of a shard's step: UNSENT, PENDING and so on."""
        return self.shard(shard).state

    def error(self, size_t shard):
        """The errno of a step that is BROKEN; 0: the shard has closed the connection."""
        return self.shard(shard).error

    def done(self, size_t shard):
        """The words of the DONE of a step that is TAKEN: the next clock, and how many blocks have counted the gradient, or had
        it already."""
        cdef psd_worker_step *s = self.shard(shard)
        cdef psd_done_head done
        assert s.state == PSD_STEP_TAKEN
        memcpy(&done, <char *>s.in_[0].iov_base + PREFIX, DONE)
        return done.clock, done.counted, done.duplicate

    def unread(self, size_t shard):
        """The bytes that were read of a step that is REFUSED or FOREIGN, and are of no answer."""
        cdef psd_worker_step *s = self.shard(shard)
        cdef bytearray found = bytearray(s.received + 1)
        psd_worker_step_copy(s, found)
        return bytes(found[s.rest : s.received])
