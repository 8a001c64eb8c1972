"""Armed steps, csrc/steps.h, for Python: a job's part on a shard, and a connection's loop.

This module owns every check that keeps an access within its buffer. It knows no files and no protobuf; who is armed, and when that
is revoked, is the caller's.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy

from psd_core._block cimport BlockCore
from psd_core._block_c cimport integer_of, psd_now, psd_page, psd_rank, word_of
from psd_core._kernels_c cimport PSD_F32, dtype_of
from psd_core._ranks cimport PSD_NEVER, Ranks, psd_see, psd_see_inside, psd_set, psd_set_gates
from psd_core._steps_c cimport *
from psd_core._tables cimport TablesCore

BLOCKS_MAX = PSD_STEP_BLOCKS_MAX
SERVED_CLOSED, SERVED_OTHER, SERVED_WRONG = PSD_SERVED_CLOSED, PSD_SERVED_OTHER, PSD_SERVED_WRONG
SERVED_AGAIN, SERVED_TICKETS, SERVED_ERROR = PSD_SERVED_AGAIN, PSD_SERVED_TICKETS, PSD_SERVED_ERROR
AGAIN_REVOKED, AGAIN_LONG_WAIT, AGAIN_CUT = PSD_AGAIN_REVOKED, PSD_AGAIN_LONG_WAIT, PSD_AGAIN_CUT


cdef class Steps:
    """A job's part on this shard, for steps.

    Args:
        blocks: for each trained block its core, "f", "d", "e" or "H" (of bfloat16) for the type of its gradients, and the place of
            its group's first scalar among all. low, high: bounds of each scalar.
        bound: steps that a worker may be ahead of the slowest one; None: any number.
        record: a buffer, and for each rank the place in it, in bytes, of the word with its clock and state; see `arm`.
        tables: of the job; None: it has none. Then there are blocks.

    Attributes:
        head_bytes, gradient_bytes, parameter_bytes: as in StepOffer, as if nothing were in memory.
    """

    cdef psd_steps steps
    cdef readonly size_t head_bytes, gradient_bytes, parameter_bytes
    cdef Ranks ranks
    cdef list cores
    cdef unsigned char[::1] record
    cdef TablesCore tables

    def __cinit__(
        self, Ranks ranks, list blocks, list low, list high, bint has_rounds, object bound, object record, TablesCore tables=None
    ):
        cdef psd_steps *s = &self.steps
        cdef BlockCore core
        cdef size_t i, k
        assert 0 < len(blocks) + (tables is not None) <= PSD_STEP_BLOCKS_MAX and len(low) == len(high)
        self.ranks, self.record, self.tables = ranks, record, tables
        if tables is not None:
            s.tables = &tables.tables
            assert tables.tables.workers <= ranks.ranks.count and tables.tables.scalars == <size_t>len(low)
            for i in range(tables.tables.count):
                for k in range(tables.tables.partition[i].scalars):
                    assert tables.tables.partition[i].at[k] < <size_t>len(low)
        self.cores = [each[0] for each in blocks]
        s.ranks, s.blocks, s.scalars, s.has_rounds = &ranks.ranks, len(blocks), len(low), has_rounds
        s.has_bound, s.bound = bound is not None, bound or 0
        for i in range(s.blocks):
            core, letter, first = blocks[i]
            assert core.block.workers <= ranks.ranks.count and core.ranks is ranks
            assert 0 <= first and first + core.block.scalars <= len(low)
            s.place[i].block, s.place[i].first_scalar = &core.block, first
            s.place[i].gradient_dtype = dtype_of(<char>ord(letter))
            assert letter == ("f" if core.block.dtype == PSD_F32 else "d") or core.block.dtype == PSD_F32 and letter in "eH"
            s.place[i].gradient_bytes = core.block.n * (2 if letter in "eH" else core.block.item)
            s.place[i].parameter_bytes = core.block.n * core.block.item
        if psd_steps_init(s) != 0:
            raise MemoryError("no memory for steps")
        self.head_bytes, self.gradient_bytes, self.parameter_bytes = s.head_bytes, s.gradient_bytes, s.parameter_bytes
        for i in range(s.scalars):
            s.low[i], s.high[i] = low[i], high[i]

    def __dealloc__(self):
        psd_steps_free(&self.steps)

    def arm(self, Py_ssize_t rank, uint64_t session, uint64_t floor, Py_ssize_t record_at, object waited, object stop_at):
        """Take the steps of a rank, which must not be armed; returns its epoch. Under the shard's lock.

        record_at: of the rank's word in `record`, which is stored with the clock while the session goes on, and the rank is live.
        waited: mask of the ranks that are waited for, in this and every later round, until all are revoked.
        stop_at: with rounds, the clock from which no steps are taken; without, they are taken until all come to this clock. None:
            always. Not lower than when others were armed, until all are revoked. The result is None if the next step is none.
        """
        cdef psd_rank *r = self.ranks.at(rank)
        cdef size_t i
        cdef uint64_t word
        assert psd_see(&r.epoch) % 2 == 1 and not psd_see_inside(&r.inside)
        assert 0 <= record_at <= self.record.shape[0] - 8 and record_at % 8 == 0
        r.session, r.floor, r.record = session, floor, <uint64_t *>(&self.record[0] + record_at)
        assert <uintptr_t>r.record % 8 == 0
        for i in range(self.steps.mask_words):
            word = word_of(waited, i)
            if self.steps.waited[i] != word:  # else others, who are armed, may be reading it
                self.steps.waited[i] = word
        psd_set(&self.steps.stop_at, PSD_NEVER if stop_at is None else stop_at)
        if psd_steps_stop(&self.steps, rank, psd_see(&r.clock)):
            return None
        psd_set(&r.epoch, psd_see(&r.epoch) + 1)
        return psd_see(&r.epoch)

    @property
    def has_gates(self):
        """True if callers wait until the slowest worker makes a step. To be set before they look at the clocks."""
        return psd_see_inside(&self.steps.has_gates) != 0

    @has_gates.setter
    def has_gates(self, bint has):
        psd_set_gates(&self.steps.has_gates, has)

    def hear(self, uint64_t number, list scalars, bint is_alike):
        """Note the scalars of a round, of all groups, that a worker has stated otherwise than by a step: steps that state others
        are not taken. is_alike: False if they are to be taken for others, whatever they are."""
        cdef size_t i
        cdef double *numbers = <double *>calloc(len(scalars) + 1, sizeof(double))
        if numbers == NULL:
            raise MemoryError("no memory for scalars")
        try:
            assert len(scalars) == <Py_ssize_t>self.steps.scalars
            for i in range(self.steps.scalars):
                numbers[i] = scalars[i]
            psd_steps_hear(&self.steps, number, -1, 0, numbers, is_alike)
        finally:
            free(numbers)

    def known(self, uint64_t first):
        """All else that decides what becomes of steps; tests compare it. Who is waited for; the clock to stop at; and of rounds
        from the first one on the round, whether its scalars differ, these, masks of who has stated them by steps, and of whom that was
        counted, and since when those that stated them are there."""
        cdef psd_step_voice *v
        cdef size_t words = self.steps.mask_words, k, i
        found = []
        for i in range(2):
            v = &self.steps.voice[i]
            if v.is_there and v.round >= first:
                scalars = [v.scalars[k] for k in range(self.steps.scalars)]
                spoke = integer_of(v.spoke, words)
                since = [v.since[k] if spoke >> k & 1 else 0 for k in range(self.ranks.ranks.count)]
                found.append((v.round, v.is_mixed, scalars, spoke, integer_of(v.counted, words), since))
        return integer_of(self.steps.waited, words), psd_see(&self.steps.stop_at), self.has_gates, sorted(found)

    def forget_voice(self, Py_ssize_t rank):
        """Forget what a rank has said by steps of rounds that have not counted it."""
        cdef int i
        self.ranks.at(rank)
        for i in range(2):
            if not self.steps.voice[i].counted[rank // 64] >> (rank % 64) & 1:
                self.steps.voice[i].spoke[rank // 64] &= ~(<uint64_t>1 << (rank % 64))

    def voices(self):
        """The rounds in which ranks have spoken by steps: round, scalars, mask of the ranks, and of those that counted, and for each
        rank, spoken or not, since when it has been there."""
        cdef psd_step_voice copy
        cdef size_t words = self.steps.mask_words, k
        cdef int odd
        found = []
        copy.scalars = <double *>calloc(self.steps.scalars + 2 * words + self.ranks.ranks.count + 1, 8)
        if copy.scalars == NULL:
            raise MemoryError("no memory for scalars")
        copy.spoke = <uint64_t *>(copy.scalars + self.steps.scalars)
        copy.counted, copy.since = copy.spoke + words, copy.spoke + 2 * words
        try:
            for odd in range(2):
                if psd_steps_voice(&self.steps, odd, &copy) and (spoke := integer_of(copy.spoke, words)):
                    scalars = [copy.scalars[k] for k in range(self.steps.scalars)]
                    since = [copy.since[k] for k in range(self.ranks.ranks.count)]
                    found.append((copy.round, scalars, spoke, integer_of(copy.counted, words), since))
        finally:
            free(copy.scalars)
        return found


cdef class StepConnection:
    """The loop of one connection.

    Args:
        fd: its socket, blocking.
        gradients: for each block the memory in which it lies; None: it travels. parameters: likewise, for each place.
        memory: all attached memory, where rows may lie; None: they travel.

    Attributes:
        done: steps that were answered by DONE. reason: of the last AGAIN.
    """

    cdef psd_step_connection connection
    cdef Steps steps
    cdef list kept

    def __cinit__(self, Steps steps, Py_ssize_t rank, int fd, list gradients=None, list parameters=None, unsigned char[::1] memory=None):
        cdef psd_step_connection *c = &self.connection
        cdef const unsigned char[::1] source
        cdef unsigned char[::1] target
        cdef psd_step_place *place
        cdef size_t i, k
        steps.ranks.at(rank)
        self.steps, self.kept = steps, []
        c.step.steps, c.step.rank, c.fd, c.places = &steps.steps, rank, fd, 1
        if gradients is not None:
            assert len(gradients) == <Py_ssize_t>steps.steps.blocks and 0 < len(parameters) <= PSD_STEP_PLACES_MAX
            c.in_memory, c.places = True, len(parameters)
            for i in range(steps.steps.blocks):
                place = &steps.steps.place[i]
                source = gradients[i]
                assert <size_t>source.shape[0] == place.gradient_bytes and <uintptr_t>&source[0] % (place.gradient_bytes // place.block.n) == 0
                c.gradient[i] = &source[0]
                for k in range(c.places):
                    target = parameters[k][i]
                    assert <size_t>target.shape[0] == place.parameter_bytes
                    c.parameter[k][i] = &target[0]
                    self.kept.append(target)
                self.kept.append(source)
        if memory is not None and memory.shape[0] and steps.tables is not None:
            assert <uintptr_t>&memory[0] % 8 == 0
            c.memory, c.memory_bytes = <char *>&memory[0], memory.shape[0]
            self.kept.append(memory)
        if psd_step_connection_init(c) != 0:
            raise MemoryError("no memory for a connection's steps")

    def __dealloc__(self):
        psd_step_connection_free(&self.connection)

    @property
    def done(self):
        return self.connection.done

    @property
    def reason(self):
        return self.connection.reason

    @property
    def error(self):
        """errno of the socket, after SERVED_ERROR."""
        return self.connection.error

    def serve(self, const unsigned char[::1] ahead):
        """Take steps until something else happens. ahead: bytes that were received already.

        Returns: SERVED_..., and the bytes received that were not used.
        """
        cdef psd_step_connection *c = &self.connection
        cdef psd_served status
        if c.have + <size_t>ahead.shape[0] > c.capacity:
            raise ValueError(f"ahead: {ahead.shape[0]} bytes are more than {c.capacity - c.have}")
        if ahead.shape[0]:
            memcpy(c.buffer + c.have, &ahead[0], ahead.shape[0])
            c.have += ahead.shape[0]
        with nogil:
            status = psd_steps_serve(c)
        if status == PSD_SERVED_TICKETS:
            return status, b""
        left, c.have = c.buffer[: c.have], 0
        return status, left

    def cancel(self):
        """End the waits of the step under way, and write no more to memory. From any thread."""
        psd_step_cancel(&self.connection)


cdef class PlayedStep:
    """One step, from a message that has come whole, piece by piece, without a socket: so tests let others go on between two pieces.

    begin, count for each block, the tables' block last, end; then pin as soon as `is_reached`; or again, or abandon. Pieces return 0, or
    the reason for AGAIN, with which the step has ended. What a store's hook has raised they raise. message: STEP, with its prefix; not in
    memory.

    Attributes:
        is_inside: it is between begin and end, and whoever revokes would wait for it. hands_back: callers' waits are to be ended.
    """

    cdef psd_step_connection connection
    cdef Steps steps
    cdef readonly bint is_inside

    def __cinit__(self, Steps steps, Py_ssize_t rank, const unsigned char[::1] message):
        cdef psd_step_connection *c = &self.connection
        steps.ranks.at(rank)
        self.steps, c.fd = steps, -1
        c.step.steps, c.step.rank = &steps.steps, rank
        if psd_step_connection_init(c) != 0:
            raise MemoryError("no memory for a step")
        if psd_step_hold(c, <const char *>&message[0], message.shape[0]) != PSD_SERVED_OTHER:
            raise ValueError(f"message: {message.shape[0]} bytes are no step of {steps.head_bytes} and {steps.gradient_bytes}")

    def __dealloc__(self):
        psd_step_connection_free(&self.connection)

    cdef int checked(self, int reason) except -1:
        cdef BlockCore core
        self.is_inside = self.is_inside and not reason
        for core in self.steps.cores:
            if core.error is not None:
                error, core.error = core.error, None
                raise error
        return reason

    @property
    def blocks(self):
        """Number of blocks, the tables' block among them."""
        return psd_step_blocks(&self.steps.steps)

    @property
    def clock(self):
        """The clock of the push."""
        return self.connection.step.head.clock

    @property
    def hands_back(self):
        return self.connection.step.hands_back != 0

    def begin(self):
        """Look whether it may be taken, and enter."""
        self.is_inside = True
        return self.checked(psd_step_find_rows(&self.connection) or psd_step_begin(&self.connection.step))

    def count(self, size_t i):
        """Count the gradient of a block, or of all tables."""
        cdef size_t at = 16 + self.steps.head_bytes, k
        assert self.is_inside and i < self.blocks
        if i == self.steps.steps.blocks:
            return self.checked(psd_step_count_rows(&self.connection.step))
        for k in range(i):
            at += psd_eights(self.steps.steps.place[k].gradient_bytes)
        return self.checked(psd_step_count(&self.connection.step, i, self.connection.buffer + at))

    def end(self):
        """Leave: all blocks have come."""
        assert self.is_inside
        psd_step_end(&self.connection.step)
        self.is_inside = False
        self.checked(0)

    @property
    def is_reached(self):
        """True if the rounds have closed."""
        return psd_step_reached(&self.connection.step) != 0

    @property
    def is_revoked(self):
        """True if its epoch is not its rank's any more."""
        return psd_see(&self.steps.ranks.at(self.connection.step.rank).epoch) != self.connection.step.head.epoch

    def pin(self):
        """Answer: returns the reason; versions of the blocks; how many have counted the gradient; the bytes of the blocks that have
        some; and those of the rows that were asked for, as they travel."""
        cdef psd_step *t = &self.connection.step
        cdef psd_page *page
        cdef size_t i
        cdef int reason = psd_step_pin(t, self.connection.began)
        if reason:
            return reason, [], 0, [], b""
        versions, values = [], []
        for i in range(self.steps.steps.blocks):
            page = &self.steps.steps.place[i].block.page[t.page[i]]
            versions.append(page.version)
            values.append(page.body[: self.steps.steps.place[i].parameter_bytes])
        psd_step_unpin(t)
        if self.steps.tables is not None:
            versions.append(t.tables_version)
        nbytes = psd_step_answered_bytes(&self.connection)
        return 0, versions, (<object>t.counted_blocks).bit_count(), values, self.connection.rows[:nbytes] if nbytes else b""

    def again(self, int reason):
        """End it while it waits; returns the reason."""
        return psd_step_again(&self.connection.step, reason, 0)

    def abandon(self):
        """End it: nobody waits for the answer any more."""
        psd_step_abandon(&self.connection.step)
