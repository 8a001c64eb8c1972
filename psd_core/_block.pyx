"""The C core of a small block, csrc/block.h, over places of an arena's mapping that its caller lends.

This module owns every check that keeps an access within its buffer. It knows no files, and not what words, sessions, clocks and
rounds mean to the caller; psd_core/_arena_lent.py lends the places.
"""

from cpython.buffer cimport PyBUF_C_CONTIGUOUS, PyBUF_FORMAT, PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.pycapsule cimport PyCapsule_GetPointer
from libc.stdint cimport int64_t, intptr_t, uint8_t, uint32_t, uint64_t, uintptr_t
from libc.string cimport memset

from psd_core._block_c cimport *


RULES_CHECKSUM = <uint32_t>PSD_RULES_CHECKSUM  # of the table of rules that this module was built with
NEEDS_PAGE, NOT_SENT, AHEAD = PSD_NEEDS_PAGE, PSD_NOT_SENT, PSD_AHEAD
STORE_CLOSED, GIVEN_BACK = PSD_STORE_CLOSED, PSD_GIVEN_BACK

cdef extern from *:
    """
    #define psd_version_of(block) __atomic_load_n(&(block)->version, __ATOMIC_ACQUIRE)
    #define psd_set_version(block, number) __atomic_store_n(&(block)->version, number, __ATOMIC_RELEASE)
    """
    uint64_t psd_version_of(psd_block *block)
    void psd_set_version(psd_block *block, uint64_t number)

cdef enum:
    _LONG = 16384  # bytes of a block whose update takes as long as giving up the GIL is worth


cdef int _on_store(void *context, const char *name) noexcept with gil:
    cdef BlockCore core = <BlockCore>context
    try:
        core.on_store(name.decode())
    except BaseException as error:
        core.error = error
        return 1
    return 0


cdef class BlockLock:
    """The lock of a block, with the interface of threading.Lock, but for time-outs. It is released by the thread that has taken it."""

    cdef BlockCore core

    def __cinit__(self, BlockCore core):
        self.core = core

    def acquire(self, bint blocking=True, double timeout=-1):
        """Take it; False if it is not to be had at once, and `blocking` is false."""
        cdef pthread_mutex_t *lock = &self.core.block.lock
        assert timeout == -1, "a block's lock knows no time-outs"
        if pthread_mutex_trylock(lock) == 0:
            return True
        if not blocking:
            return False
        with nogil:  # whoever holds it may need the GIL
            pthread_mutex_lock(lock)
        return True

    def release(self):
        """Give it back."""
        pthread_mutex_unlock(&self.core.block.lock)

    def __enter__(self):
        return self.acquire()

    def __exit__(self, *_):
        pthread_mutex_unlock(&self.core.block.lock)


cdef class BlockCore:
    """One block. What changes the round, the version or a spare is called by one thread at a time; pages are pinned and given back by any.

    Pages are known by the number of their entry and its use. dtype: "f" or "d". front: a buffer, at `entry_at` of which the
    block's entry of the arena's table lies. slot_at: for each slot of the rule its place among the page's slots, -1: not kept.
    zeros: scalars that must be 0. rate: the scalar that is divided by 1 + age; -1: none. on_store: called with a name before each
    store that matters after a kill; what it raises ends the call, and the process is taken for dead.
    """

    def __cinit__(
        self, object front, Py_ssize_t entry_at, *, str dtype, size_t length, object ends, size_t workers, size_t head_words,
        size_t body_words, size_t stride, uint64_t index, int rule, tuple flags, tuple slot_at, int scalars, tuple zeros, int rate,
        bint has_rounds, bint is_mean, int64_t quorum, on_store=None,
    ):
        cdef psd_block *b = &self.block
        cdef Py_ssize_t i
        self.ends, self.zeros, self.mappings = ends, zeros, []
        assert dtype in "fd" and 0 < workers <= 64 * 16
        b.dtype, b.item = PSD_F32 if dtype == "f" else PSD_F64, 4 if dtype == "f" else 8
        b.n, b.segments, b.workers, b.head_words, b.body_words, b.stride = length, len(ends), workers, head_words, body_words, stride
        assert head_words == 8 + 2 * workers + b.segments and stride >= length * b.item and stride % 64 == 0
        b.slots = (body_words * 8 // stride if stride else 1) - 1
        assert (b.segments and ends[b.segments - 1] == length) or length == 0
        assert all([ends[i] <= ends[i + 1] for i in range(len(ends) - 1)])
        assert 0 <= rule < PSD_RULES and 0 <= scalars <= PSD_SCALARS_MAX and -1 <= rate < scalars
        assert len(flags) <= PSD_FLAGS_MAX and len(slot_at) <= PSD_SLOTS_MAX and all([0 <= at < scalars for at in zeros])
        b.index, b.rule, b.scalars, b.rate = index, rule, scalars, rate
        b.has_rounds, b.is_mean, b.quorum = has_rounds, is_mean, quorum
        if b.segments:
            b.ends = &self.ends[0]
        for i in range(len(flags)):
            b.flags[i] = flags[i]
        for i in range(PSD_SLOTS_MAX):
            b.slot_at[i] = slot_at[i] if i < len(slot_at) else -1
            assert -1 <= b.slot_at[i] < <int64_t>b.slots
        PyObject_GetBuffer(front, &self.front, PyBUF_SIMPLE | PyBUF_WRITABLE)
        self.has_front = True
        assert 0 <= entry_at <= self.front.len - 8 and (<uintptr_t>self.front.buf + entry_at) % 8 == 0
        b.entry = <uint64_t *>(<char *>self.front.buf + entry_at)
        if on_store is not None:
            self.on_store = on_store
            b.on_store, b.context = _on_store, <void *>self
        if psd_block_init(b) != 0:
            raise MemoryError("no memory for a block")

    def __dealloc__(self):
        psd_block_free(&self.block)
        if self.has_front:
            PyBuffer_Release(&self.front)

    cdef uint64_t *mask(self, object mask) except NULL:
        """The words of a mask, good until the next call."""
        cdef size_t i
        if self.block.mask_words == 1:
            self.waited_in_few[0] = mask
        else:
            for i in range(self.block.mask_words):
                self.waited_in_few[i] = word_of(mask, i)
        return self.waited_in_few

    cdef int check(self, int status) except -1:
        """Return an outcome, unless it is no answer."""
        if status == PSD_NO_MEMORY:
            raise MemoryError("no memory for the sum of a round")
        if status == PSD_STOPPED:
            error, self.error = self.error, None
            raise error
        return status

    # Rounds.

    @property
    def version(self):
        """The version; with rounds also the number of the open one."""
        return psd_version_of(&self.block)

    @version.setter
    def version(self, uint64_t version):
        psd_set_version(&self.block, version)
        self.ring()

    def open(self, uint64_t version):
        """Begin with a version, and with an open round that nobody has a gradient in."""
        psd_block_open(&self.block, version)
        self.ring()

    cdef void ring(self) noexcept:
        """Wake the steps that sleep until a round closes."""
        if self.block.ranks != NULL:
            psd_ring(self.block.ranks)

    def contribute(
        self, int64_t rank, uint64_t session, uint64_t clock, double weight, object values, object present, object scalars,
        uint64_t since, object version_read, double scale, bint is_newest, bint already, object waited,
    ):
        """Count a gradient, and apply the update if it is complete then; returns the outcome.

        values: None, or (n,) of the block's type, or float16 or uint16 (bfloat16) beside float32. present: None, or (k,) uint8.
        waited: mask of those that the round waits for.
        """
        cdef psd_block *b = &self.block
        cdef psd_part_of_push part
        cdef double[PSD_SCALARS_MAX] numbers
        cdef Py_buffer view, mask
        cdef bint has_values = False, has_mask = False
        cdef int i, status
        cdef uint64_t before = b.version
        cdef uint64_t *among = self.mask(waited)
        if not 0 <= rank < <int64_t>b.workers or b.current < 0:
            raise IndexError(f"rank: {rank} of {b.workers}, of a block with page {b.current}")
        if len(scalars) != b.scalars:
            raise ValueError(f"scalars: expected {b.scalars}, got {len(scalars)}")
        for i in range(b.scalars):
            numbers[i] = scalars[i]
        for place in self.zeros:
            if numbers[place] != 0:
                raise ValueError(f"scalars: expected number {place} to be 0 without its flag, got {numbers[place]}")
        memset(&part, 0, sizeof(part))
        part.rank, part.session, part.clock, part.since, part.weight, part.scale = rank, session, clock, since, weight, scale
        part.scalars, part.is_newest, part.already = numbers, is_newest, already
        if version_read is not None:
            part.version_read, part.is_version_known = version_read, True
        try:
            if values is not None:
                PyObject_GetBuffer(values, &view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT)
                has_values = True
                part.values, part.values_dtype = view.buf, self.dtype_of(&view)
            if present is not None:
                PyObject_GetBuffer(present, &mask, PyBUF_C_CONTIGUOUS)
                has_mask = True
                if mask.itemsize != 1 or <size_t>mask.len != b.segments:
                    raise ValueError(f"present: expected {b.segments} x uint8, got {mask.len} bytes of {mask.itemsize}")
                part.present = <const uint8_t *>mask.buf
            if b.n * b.item < _LONG:
                status = psd_block_contribute(b, &part, among)
            else:
                with nogil:
                    status = psd_block_contribute(b, &part, among)
        finally:
            if has_values:
                PyBuffer_Release(&view)
            if has_mask:
                PyBuffer_Release(&mask)
            if b.has_rounds and b.version != before:
                self.ring()
        return self.check(status)

    cdef psd_dtype dtype_of(self, Py_buffer *view) except *:
        """The type of a gradient, which has the block's length, and its type or half of float32."""
        cdef char letter = view.format[0] if view.format != NULL and view.format[1] == 0 else c"?"
        cdef bint is_own = letter == (c"f" if self.block.dtype == PSD_F32 else c"d")
        cdef bint is_half = self.block.dtype == PSD_F32 and (letter == c"e" or letter == c"H")
        if view.ndim != 1 or <size_t>view.shape[0] != self.block.n or not (is_own or is_half):
            raise ValueError(f"values: expected ({self.block.n},) of the block's type, or of its half, got {view.len} bytes")
        if view.len and <uintptr_t>view.buf % <uintptr_t>view.itemsize != 0:
            raise ValueError("values: expected aligned memory")
        return self.block.dtype if is_own else PSD_F16 if letter == c"e" else PSD_BF16

    def is_complete(self, object waited, bint is_void):
        """True if the open round is to be applied with what it has. is_void: so is one that nobody has a gradient in."""
        return psd_block_is_complete(&self.block, self.mask(waited), is_void) != 0

    def close_round(self):
        """Apply a round that is complete; returns the outcome."""
        cdef int status
        assert self.block.current >= 0
        with nogil:
            status = psd_block_close_round(&self.block)
        self.ring()
        return self.check(status)

    def session_of(self, int64_t rank):
        """The session whose gradient of a rank the open round has; 0: none."""
        if not 0 <= rank < <int64_t>self.block.workers:
            return 0
        return self.block.sessions[rank] if psd_block_has(&self.block, rank) else 0

    @property
    def contributors(self):
        """Mask of the ranks that the open round has a gradient of."""
        return integer_of(self.block.contributors, self.block.mask_words)

    @property
    def round(self):
        """All of the open round: sessions by rank, weight, who gave the scalars and since when, these, segments, the sum's bytes."""
        cdef psd_block *b = &self.block
        cdef size_t i
        return (
            {rank: self.session_of(rank) for rank in range(b.workers) if self.session_of(rank)},
            b.total_weight,
            (b.since, b.rank, tuple([b.held[i] for i in range(b.scalars)])) if b.has_voice else None,
            b.touched[: b.segments],
            (<char *>b.sum)[: b.n * b.item] if b.has_sum else None,
        )

    def attend(self, object ranks, bint measures_ranks):
        """Wake the steps of these ranks (psd_core.steps.Ranks) when a round closes; measures_ranks: note how long others wait for each."""
        cdef psd_ranks *found = <psd_ranks *>PyCapsule_GetPointer(ranks.capsule, "psd_ranks")
        assert self.block.workers <= found.count
        self.ranks = ranks
        self.block.measures_ranks, self.block.ranks = measures_ranks, found

    def on_gradient(self, int64_t rank, double now, object waited):
        """Note a gradient that the open round has counted, or is about to."""
        assert 0 <= rank < <int64_t>self.block.workers
        psd_block_on_gradient(&self.block, rank, now, self.mask(waited))

    def on_close(self, double now, object waited):
        """Note that the round has closed. waited: mask of the workers that are waited for now."""
        psd_block_on_close(&self.block, now, self.mask(waited))

    @property
    def times(self):
        """True if the open round has a gradient; when the last one closed, or None; counts of how long each was open; their sum."""
        cdef psd_round_times *t = &self.block.times
        cdef int i
        counts = [t.closed[i] for i in range(PSD_SECONDS)]
        return t.is_open != 0, t.closed_at if t.has_closed else None, counts, t.closed_s

    @property
    def has_tickets(self):
        """True if callers wait for a version by tickets: then whoever closes a round in a step says so."""
        return self.block.has_tickets != 0

    @has_tickets.setter
    def has_tickets(self, bint has):
        self.block.has_tickets = has

    @property
    def is_stuck(self):
        """True if no step may count anything."""
        return self.block.is_stuck != 0

    @is_stuck.setter
    def is_stuck(self, bint stuck):
        self.block.is_stuck = stuck

    def lock(self):
        """The block's lock, which steps take, too."""
        return BlockLock(self)

    @property
    def ages(self):
        """Gradients that were applied without rounds, by their age: of 0, 1, 2, 3 to 4, 5 to 8, and so on."""
        cdef int i, end = PSD_AGES
        while end and not self.block.ages[end - 1]:
            end -= 1
        return [self.block.ages[i] for i in range(end)]

    @property
    def age_total(self):
        """The sum of these ages."""
        return self.block.age_total

    # Pages.

    def lend(self, object head, Py_ssize_t head_at, uint64_t number, object body, Py_ssize_t body_at, uint64_t body_number):
        """Take a place, which lies in the buffers `head` and `body` from these bytes; returns its entry."""
        cdef unsigned char[::1] first = head
        cdef unsigned char[::1] second = body
        cdef psd_block *b = &self.block
        cdef int64_t found
        assert 0 <= head_at <= first.shape[0] - <Py_ssize_t>(8 * b.head_words)
        assert 0 <= body_at <= second.shape[0] - <Py_ssize_t>(8 * b.body_words)
        cdef uint64_t *words = <uint64_t *>(&first[0] + head_at)
        cdef char *values = <char *>(&second[0] + body_at)
        assert <uintptr_t>words % 8 == 0 and <uintptr_t>values % 64 == 0
        found = psd_block_lend(b, words, values, number, body_number)
        if found < 0:
            raise MemoryError("no memory for a page")
        while len(self.mappings) <= found:
            self.mappings.append(None)
        self.mappings[found] = first, second
        return found

    def surplus(self, int64_t kept):
        """Give an entry back that cannot be used again, or of which there are more than `kept`; -1: there is none."""
        cdef int64_t found = psd_block_surplus(&self.block, kept)
        if found >= 0:
            self.mappings[found] = None
        return found

    def adopt(self, int64_t entry, uint64_t version, uint64_t content):
        """Take an entry for the current page, as an earlier process has published it."""
        assert 0 <= entry < self.block.pages and self.block.current < 0
        psd_block_adopt(&self.block, entry, version, content)

    def facts(self, int64_t entry):
        """Use, version and content of an entry."""
        assert 0 <= entry < self.block.pages
        return self.block.page[entry].use, self.block.page[entry].version, self.block.page[entry].content

    @property
    def current(self):
        """The entry of the current page; -1: there is none."""
        return self.block.current

    @property
    def is_closed(self):
        """True after `stop`."""
        return self.block.is_closed != 0

    def spare(self):
        """An entry to write the next version into, or the outcome, negative."""
        cdef psd_outcome why
        cdef int64_t found = psd_block_spare(&self.block, &why)
        return found if found >= 0 else -<int64_t>why

    def publish(self, int64_t entry, uint64_t use, uint64_t version):
        """Make a spare the current page; returns the outcome."""
        assert psd_block_state(&self.block, entry, use) == PSD_SPARE, "the page to publish is no spare"
        return self.check(psd_block_publish(&self.block, entry, version))

    def discard(self, int64_t entry, uint64_t use):
        """Take a spare back that will not be published."""
        assert psd_block_discard(&self.block, entry, use) == 0, "the page to discard is no spare"

    def pin(self):
        """Pin the current page; returns its entry, or the outcome, negative."""
        cdef psd_outcome why
        cdef int64_t found = psd_block_pin(&self.block, &why)
        return found if found >= 0 else -<int64_t>why

    def unpin(self, int64_t entry, uint64_t use):
        """Take a pinned page back."""
        assert psd_block_unpin(&self.block, entry, use) == 0, "the page to unpin is not published"

    def pins(self, int64_t entry, uint64_t use):
        """Readers of a page, plus 1 while it is current."""
        return psd_block_pins(&self.block, entry, use)

    def state(self, int64_t entry, uint64_t use):
        """1: the page is free, 2: a spare, 3: published."""
        return psd_block_state(&self.block, entry, use)

    @property
    def free(self):
        """Number of places that nobody uses."""
        cdef int64_t i
        return sum([self.block.page[i].state == PSD_FREE for i in range(self.block.pages)])

    def stop(self):
        """Publish and pin nothing more. Returns the pages that somebody has in hand, the first time; then 0."""
        return psd_block_stop(&self.block)
