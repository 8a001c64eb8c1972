"""The C store of a table's partition, over a mapping that the caller makes: `Partition`, and pure functions of ids.

This module owns every check that keeps an access within its buffer. It knows no files: it says which bytes of the file it is
about to write, and `psd_core/table.py` sees to it that they are there.
"""

import os

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport int64_t, intptr_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memset

from psd_core._table_c cimport *


cdef extern from *:
    """
    /* What Cython makes of this file runs once a call: it is to be small rather than fast. */
    #if defined(__GNUC__) && !defined(__clang__)
    #pragma GCC optimize("Os")
    #endif
    """


psd_slots_seed = int.from_bytes(os.urandom(8), "little")
RULES_CHECKSUM = <uint32_t>PSD_RULES_CHECKSUM  # of the table of rules that this module was built with
REMOVED_MAX = PSD_REMOVED_MAX
LOG_MAX = PSD_LOG_MAX
OTHER_INDEX, ROWS = PSD_OTHER_INDEX, PSD_ROWS  # numbers of regions


def mixed(const uint64_t[::1] ids not None, uint64_t[::1] out not None):
    """Set `out` to the hashes of ids."""
    if out.shape[0] != ids.shape[0]:
        raise ValueError(f"out: expected length {ids.shape[0]}, got {out.shape[0]}")
    if ids.shape[0]:
        with nogil:
            psd_mix_all(&ids[0], &out[0], ids.shape[0])


def initial(
    const uint64_t[::1] ids not None, float[:, ::1] out not None, uint64_t seed, int init, double a, double b,
):
    """Set `out`, a row for each id, to the initial values of a table's rows."""
    cdef psd_table_spec spec
    cdef intptr_t i
    if out.shape[0] != ids.shape[0]:
        raise ValueError(f"out: expected length {ids.shape[0]}, got {out.shape[0]}")
    memset(&spec, 0, sizeof(spec))
    spec.dim, spec.seed, spec.init, spec.a, spec.b = out.shape[1], seed, init, a, b
    if out.shape[1]:
        with nogil:
            for i in range(ids.shape[0]):
                psd_initial_value(&spec, ids[i], &out[i, 0])


cdef class Mutex:
    """A lock that C takes, too, with the interface of threading.Lock, but for time-outs. The thread that has taken it releases it."""

    def __cinit__(self):
        self.is_made = pthread_mutex_init(&self.mutex, NULL) == 0
        if not self.is_made:
            raise MemoryError("no lock")

    def __dealloc__(self):
        if self.is_made:
            pthread_mutex_destroy(&self.mutex)

    def acquire(self, bint blocking=True, double timeout=-1):
        """Take it; False if it is not to be had at once, and `blocking` is false."""
        assert timeout == -1, "this lock knows no time-outs"
        if pthread_mutex_trylock(&self.mutex) == 0:
            return True
        if not blocking:
            return False
        with nogil:  # whoever holds it may need the GIL
            pthread_mutex_lock(&self.mutex)
        return True

    def locked(self):
        """True if somebody has it."""
        if pthread_mutex_trylock(&self.mutex):
            return True
        pthread_mutex_unlock(&self.mutex)
        return False

    def release(self):
        """Give it back."""
        pthread_mutex_unlock(&self.mutex)

    def __enter__(self):
        return self.acquire()

    def __exit__(self, *_):
        pthread_mutex_unlock(&self.mutex)


cdef class Sums:
    """Sums of rows by id. One thread at a time."""

    def __cinit__(self, intptr_t dim):
        assert dim > 0
        self.dim = dim

    def __dealloc__(self):
        psd_sums_free(&self.sums)

    def __len__(self):
        return self.sums.count

    def prepare(self, const uint64_t[::1] ids not None, const float[:, ::1] grads not None):
        """Make ready gradients for `add`; the caller keeps them until then."""
        cdef intptr_t n = ids.shape[0]
        cdef int status
        assert grads.shape[0] == n and grads.shape[1] == self.dim
        self.is_ready = False
        if n == 0:
            return
        with nogil:
            status = psd_sums_prepare(&self.sums, &ids[0], &grads[0, 0], n, self.dim)
        if status != 0:
            raise MemoryError(f"no memory to add {n} rows")
        self.is_ready = True

    def add(self, double weight):
        """Add weight * gradient to the sum of each id that was made ready."""
        self.sums.is_touched = True
        if self.is_ready:
            self.is_ready = False
            with nogil:
                psd_sums_add(&self.sums, self.dim, weight)

    @property
    def is_touched(self):
        """True if something was added, perhaps of no row."""
        return self.sums.is_touched != 0

    def clear(self):
        """Forget all sums, and keep the memory."""
        psd_sums_clear(&self.sums)

    def ids(self):
        """A view of the ids, in the order in which they came first; good until the next change."""
        return <uint64_t[: self.sums.count]> self.sums.ids if self.sums.count else None

    def values(self):
        """A view of the sums, likewise."""
        return <float[: self.sums.count, : self.dim]> self.sums.values if self.sums.count else None


cdef void _call(void *context, const char *name) noexcept with gil:
    (<object>context)(name.decode())


cdef class OwnRule:
    """A user's own rule for one push: a function of the number of rows, which changes the first of `pieces`, (1 + slots, batch, dim), by `gradients`, (batch, dim)."""

    cdef psd_own_rule own
    cdef uint64_t dim, width
    cdef object apply, kept
    cdef readonly object error  # what the function has raised, or None

    def __cinit__(self, apply, float[:, :, ::1] pieces not None, float[:, ::1] gradients not None, uint64_t[:, ::1] names not None):
        assert gradients.shape[0] == names.shape[1] == pieces.shape[1] > 0 and gradients.shape[1] == pieces.shape[2] > 0 and names.shape[0] == 2
        self.apply, self.kept, self.dim, self.width = apply, (pieces, gradients, names), pieces.shape[2], pieces.shape[0] * pieces.shape[2]
        self.own = psd_own_rule(_apply, <void *>self, pieces.shape[1], 0, &pieces[0, 0, 0], &gradients[0, 0], &names[0, 0], &names[1, 0])


cdef int _apply(void *context, intptr_t count) noexcept with gil:
    cdef OwnRule rule = <OwnRule>context
    try:
        rule.apply(count)
    except BaseException as error:
        rule.error = error
        return -1
    return 0


cdef class Partition:
    """One partition. One thread at a time may call what changes it, with `writing` held; `read` and `walk` may come from any
    thread meanwhile."""

    def __cinit__(
        self, *, uint64_t dim, uint64_t width, uint64_t rows_max, uint64_t push_max, uint64_t notes, uint64_t seed, int rule,
        bint rowwise, int init, double a, double b, bint evicts, uint64_t admit_after, uint64_t admit_below, tuple flags, tuple slot_at, tuple slot_start, bint is_half, bint catches_up, bint settles,
        tuple rest_without, int64_t decay_at, on_store=None,
    ):
        cdef int i
        cdef psd_table_spec *spec = &self.table.spec
        assert -1 <= rule < PSD_RULES and len(flags) <= PSD_FLAGS_MAX and len(slot_at) == len(slot_start) <= PSD_OWN_SLOTS_MAX
        assert rule >= 0 or (width == (1 + len(slot_at)) * dim and not catches_up and not rowwise)
        spec.slots = len(slot_at)
        spec.dim, spec.width, spec.rows_max, spec.push_max, spec.notes, spec.seed = dim, width, rows_max, push_max, notes, seed
        spec.rule, spec.rowwise, spec.init, spec.a, spec.b, spec.evicts = rule, rowwise, init, a, b, evicts
        spec.admit_after, spec.admit_below = admit_after, admit_below
        assert len(rest_without) <= PSD_SCALARS_MAX and -1 <= decay_at < PSD_SCALARS_MAX
        spec.is_half, spec.catches_up, spec.settles, spec.rests, spec.decay_at = is_half, catches_up, settles, any(rest_without), decay_at
        for i in range(len(rest_without)):
            spec.rest_without[i] = rest_without[i]
        for i in range(len(flags)):
            spec.flags.flags[i] = flags[i]
        for i in range(spec.slots):
            spec.slot_at[i], spec.slot_start[i] = slot_at[i], slot_start[i]
            assert spec.slot_at[i] < 0 or spec.slot_at[i] + <int64_t>(1 if rowwise else dim) <= <int64_t>width - 2 * catches_up
        if not psd_table_plan(&self.table):
            raise ValueError(f"rows_max: too many, got {rows_max}")
        if psd_table_make_lock(&self.table) != 0:
            raise MemoryError("no lock")
        self.has_lock = True
        self.writing = Mutex()
        self.table.writing = &self.writing.mutex
        if on_store is not None:
            self.on_store = on_store
            self.table.on_store, self.table.context = _call, <void *>on_store

    def __dealloc__(self):
        psd_scratch_free(&self.table.scratch)
        psd_oldest_free(&self.table.oldest)
        if self.table.snapshot.is_active:
            psd_snapshot_end(&self.table)
        if self.has_lock:
            psd_table_drop_lock(&self.table)
        if self.is_attached:
            PyBuffer_Release(&self.view)

    @property
    def size(self):
        """Bytes of the file that the regions need, most of them a hole at first."""
        return self.table.size

    @property
    def regions(self):
        """Start and size in bytes of each region."""
        return [(region.at, region.size) for region in self.table.region[:PSD_REGIONS]]

    def attach(self, object mapping, bint fresh, uint64_t salt):
        """Take over the mapping of a file of zeros, with this salt, or of what a process has left; returns the problem, or None."""
        cdef int status = 0
        assert not self.is_attached
        PyObject_GetBuffer(mapping, &self.view, PyBUF_SIMPLE | PyBUF_WRITABLE)
        self.is_attached = True
        assert <uint64_t>self.view.len >= self.table.size
        self.table.base = <char *>self.view.buf
        with nogil:
            if fresh:
                psd_table_format(&self.table, salt)
            else:
                status = psd_table_adopt(&self.table)
        if status > 0:
            raise MemoryError("no memory to look at all rows")
        return self.table.problem.decode() if status else None

    def lack(self, uint64_t n, uint64_t entries=0):
        """Region that is too short for a push of n ids and entries of the log, the bytes that it has, and those it needs; or None."""
        cdef uint64_t nbytes = 0
        cdef int region = psd_table_lack(&self.table, n, entries, &nbytes)
        return None if region < 0 else (region, self.table.region[region].backed, nbytes)

    def set_backed(self, int region, uint64_t nbytes):
        """Note that writing to the first bytes of a region cannot fail; spare whoever writes there the page faults."""
        cdef psd_region *place = &self.table.region[region]
        assert 0 <= region < PSD_REGIONS and nbytes <= place.size
        if self.is_attached and nbytes > place.backed > 0:
            with nogil:
                psd_populate(self.table.base + place.at + place.backed, nbytes - place.backed)
        place.backed = nbytes

    def rows_space(self):
        """Bytes of the region of rows that have space, and those among them up to the last place that ever had a row."""
        return self.table.region[PSD_ROWS].backed, self.table.root.places * self.table.spec.stored * 4

    def enlarge_page(self, uint64_t at):
        """Have one large page hold the file from byte `at` on, a multiple of its size, where it has space at least in part. Returns whether it does."""
        cdef int status
        assert at % PSD_LARGE_PAGE == 0 and at + PSD_LARGE_PAGE <= self.table.size
        if not self.is_attached:
            return False
        with nogil:
            status = psd_make_large(self.table.base + at)
        return status == 0

    def clear(self, uint64_t start, uint64_t nbytes):
        """Set bytes of the file to 0, where it cannot have holes."""
        assert start + nbytes <= self.table.size
        with nogil:
            memset(self.table.base + start, 0, nbytes)

    def is_backed_at_opening(self, int region):
        """True for the large regions that have space as far as an opened partition needs it: heads, rows, the current index."""
        return region in (PSD_HEADS, PSD_ROWS, PSD_INDEX + self.table.root.current)

    def behind(self):
        """Index region that is being left or was left last, and how many of its first bytes nobody will read."""
        cdef psd_root *root = self.table.root
        cdef uint64_t done
        if not root.next_buckets:
            return PSD_INDEX + (root.current ^ 1), self.table.region[PSD_INDEX].size
        done = root.moved * root.buckets >> 32
        return PSD_INDEX + root.current, done * 64

    def must_move(self, uint64_t n):
        """True if the index has to make a step of growth before n more rows come."""
        return psd_index_must_move(&self.table, n) != 0

    def move(self, uint64_t n):
        """Make a step of growth."""
        with nogil:
            psd_index_move(&self.table, n)

    @property
    def step(self):
        """Updates of the table."""
        return self.table.root.step

    @property
    def is_moving(self):
        """True while the index grows."""
        return self.table.root.next_buckets != 0

    def read(self, const uint64_t[::1] ids not None, float[:, ::1] out not None, uint8_t[::1] found, bint whole, int64_t clock):
        """Copy rows; a clock < 0 counts no use."""
        cdef intptr_t n = ids.shape[0]
        cdef uint64_t floats = self.table.spec.width if whole else self.table.spec.dim
        cdef int status
        assert self.is_attached and out.shape[0] == n and <uint64_t>out.shape[1] == floats
        assert found is None or found.shape[0] == n
        if n == 0:
            return
        with nogil:
            status = psd_table_read(&self.table, &ids[0], n, &out[0, 0], &found[0] if found is not None else NULL, whole, clock)
        if status != 0:
            raise MemoryError(f"no memory to bring {n} rows up to date")

    def push(
        self, const uint64_t[::1] ids not None, const float[:, ::1] values not None, *, tuple scalars, double scale, uint64_t clock,
        const uint64_t[::1] notes, bint distinct, bint whole, int64_t step=-1,
        const uint64_t[::1] clocks=None, const double[:, ::1] history=None, OwnRule own=None,
        const uint64_t[::1] more_ids=None, const float[:, ::1] more_values=None,
    ):
        """Apply the rule, or store whole rows, for which there is room, so that only `commit` is left to do. More ids, and their values, are added to the push."""
        cdef psd_push push
        cdef int i, status
        cdef intptr_t n = ids.shape[0]
        cdef uint64_t width = self.table.spec.width if whole else self.table.spec.dim
        cdef uint64_t nbytes = 0
        cdef psd_part[2] parts
        memset(parts, 0, sizeof(parts))
        if n:
            parts[0].ids, parts[0].values, parts[0].n = &ids[0], &values[0, 0], n
        if more_ids is not None and more_ids.shape[0]:
            assert not whole and not distinct and more_values.shape[0] == more_ids.shape[0] and <uint64_t>more_values.shape[1] == width
            parts[1].ids, parts[1].values, parts[1].n = &more_ids[0], &more_values[0, 0], more_ids.shape[0]
            n += parts[1].n
        assert self.is_attached and values.shape[0] == ids.shape[0] and <uint64_t>values.shape[1] == width
        assert <uint64_t>n <= self.table.spec.push_max and len(scalars) <= PSD_SCALARS_MAX
        assert psd_table_lack(&self.table, n, history.shape[0] if history is not None else 0, &nbytes) < 0 and not psd_index_must_move(&self.table, n)
        assert notes is None or <uint64_t>notes.shape[0] == self.table.spec.notes
        memset(&push, 0, sizeof(push))
        push.hyper = self.table.spec.flags
        for i in range(len(scalars)):
            push.hyper.scalars[i] = scalars[i]
        push.scale, push.clock, push.distinct, push.whole, push.step = scale, clock, distinct, whole, step
        assert clocks is None or (whole and clocks.shape[0] == n)
        push.clocks = &clocks[0] if clocks is not None and n else NULL
        if history is not None and (history.shape[0] or self.table.spec.catches_up):
            assert whole and self.table.spec.catches_up and history.shape[0] <= PSD_LOG_MAX and history.shape[1] <= 1 + PSD_SCALARS_MAX
            push.history = &history[0, 0] if history.shape[0] else &scale  # not NULL: the log is empty from now on
            push.entries, push.scalars = history.shape[0], history.shape[1] - 1
        assert (own is not None) == (self.table.spec.rule < 0 and not whole)
        if own is not None:
            assert (own.dim, own.width) == (self.table.spec.dim, self.table.spec.width)
            own.own.scale, push.own = scale, &own.own
        push.notes = &notes[0] if notes is not None and notes.shape[0] else NULL
        with nogil:
            status = psd_table_push(&self.table, &push, parts, 2)
        if own is not None and own.error is not None:
            raise own.error
        if status != 0:
            raise MemoryError(f"no memory to sort {n} ids")

    def commit(self):
        """Commit the push that was made last, since when nothing else has changed; returns how many rows are new."""
        cdef uint64_t created = self.table.root.created
        with nogil:
            psd_table_commit_push(&self.table)
        return self.table.root.created - created

    def walk(self, uint64_t tag, psd_head[::1] heads not None, float[:, ::1] rows not None):
        """Copy the rows that come next; returns their number and the tag to go on from."""
        cdef uint64_t count = 0
        assert self.is_attached and heads.shape[0] == rows.shape[0] >= 64 and <uint64_t>rows.shape[1] == self.table.spec.width
        with nogil:
            tag = psd_table_walk(&self.table, tag, &heads[0], &rows[0, 0], heads.shape[0], &count)
        return count, tag

    def begin_snapshot(self, bint is_full, uint64_t since, uint64_t since_clock):
        """Begin a snapshot of the table as it is now; returns its version."""
        assert not self.table.snapshot.is_active
        psd_snapshot_begin(&self.table, is_full, since, since_clock)
        return self.table.snapshot.version

    def next_of_snapshot(self, psd_head[::1] heads not None, float[:, ::1] rows not None):
        """Copy rows of the snapshot; returns how many, and whether there may be more."""
        cdef uint64_t count = 0
        cdef int more
        assert self.table.snapshot.is_active
        assert heads.shape[0] == rows.shape[0] >= 64 and <uint64_t>rows.shape[1] == self.table.spec.width
        with nogil:
            more = psd_snapshot_next(&self.table, &heads[0], &rows[0, 0], heads.shape[0], &count)
        if self.table.snapshot.is_failed:
            raise MemoryError("no memory to save rows for a snapshot")
        return count, more != 0

    def end_snapshot(self):
        """End the snapshot, and free its memory."""
        psd_snapshot_end(&self.table)

    def removals(self):
        """Number of the first removal that is known, and of the next one."""
        return psd_first_removal(&self.table, self.table.root), psd_removals(self.table.root)

    def removed(self, uint64_t first, uint64_t[::1] out not None):
        """Copy the ids of removals from a number on."""
        cdef uint64_t i
        assert psd_first_removal(&self.table, self.table.root) <= first and first + <uint64_t>out.shape[0] <= psd_removals(self.table.root)
        for i in range(<uint64_t>out.shape[0]):
            out[i] = psd_removal(&self.table, first + i)[0]

    def expire(self, uint64_t clock, uint64_t age):
        """Remove some of the rows that were not used for more than `age`; returns whether there may be more."""
        cdef int status
        with nogil:
            status = psd_table_expire(&self.table, clock, age)
        if status < 0:
            raise MemoryError("no memory to look for old rows")
        return status != 0

    @property
    def used_since(self):
        """Clock before which no row was used; of one that was written since as used earlier it need not be true."""
        return psd_oldest_used(&self.table.oldest)

    def discard(self, const uint64_t[::1] ids not None):
        """Remove rows by id; returns how many there were."""
        cdef uint64_t count
        assert 0 < ids.shape[0] <= PSD_REMOVED_MAX
        with nogil:
            count = psd_table_discard(&self.table, &ids[0], ids.shape[0])
        return count

    def notes(self, uint64_t[::1] out not None):
        """Copy the notes."""
        cdef intptr_t i
        assert <uint64_t>out.shape[0] == self.table.spec.notes
        for i in range(out.shape[0]):
            out[i] = psd_notes(&self.table)[i]

    @property
    def logged(self):
        """Number of entries of the log."""
        return self.table.root.log_end - self.table.root.log_first

    @property
    def fresh_moves(self):
        """True if a step has changed rows that nobody has trained, where rows catch up."""
        return bool(self.table.root.fresh_moves)

    def history(self, double[:, ::1] out not None):
        """Copy the log: of each entry the step and the scalars."""
        cdef intptr_t i, j
        cdef psd_log_entry *entry
        assert <uint64_t>out.shape[0] == self.logged and 0 < out.shape[1] <= 1 + PSD_SCALARS_MAX
        for i in range(out.shape[0]):
            entry = psd_logged(&self.table, self.table.root.log_first + i)
            out[i, 0] = <double>entry.from_step
            for j in range(out.shape[1] - 1):
                out[i, 1 + j] = entry.scalars[j]

    def places(self):
        """Places of all rows and of all spares, for tests."""
        cdef uint64_t *words[64]
        cdef uint64_t count = 0, tag = 0, i
        rows = []
        while tag < 4294967296:
            tag = psd_index_scan(&self.table, tag, words, 64, &count)
            rows += [<uint32_t>words[i][0] - 1 for i in range(count)]
        return {"rows": rows, "spares": [psd_spares(&self.table)[i] for i in range(self.table.root.spares)]}

    def counters(self):
        """Numbers of the valid root, and of reads since the partition was opened."""
        cdef psd_root *root = self.table.root
        return {
            "step": root.step, "version": root.version, "clock": root.clock, "rows": root.rows, "spares": root.spares, "buckets": root.buckets, "created": root.created,
            "evicted": root.evicted, "expired": root.expired, "removed": root.removed, "refused": root.refused,
            "unadmitted": root.unadmitted,
            "reads": self.table.reads, "hits": self.table.hits,
        }
