/* The life of a partition: where its regions lie, its commits, and what becomes of them after a crash. */
#include "portable.h"

#include <errno.h>

#include "arena.h"
#include "table.h"

static uint64_t aligned(uint64_t bytes, uint64_t unit)
{
    return (bytes + unit - 1) / unit * unit;
}

static psd_root *root_at(const psd_table *t, uint64_t commit)
{
    return (psd_root *)(t->base + t->region[PSD_CONTROL].at + 128 + commit % 2 * t->root_bytes);
}

static uint64_t check_of(const psd_table *t, const psd_root *root)
{
    return psd_checksum(&root->commit, t->root_bytes / 8 - 1);
}

/* For a push of n ids: the rows that are stored, which are no more than there may be, and a sighting for each id. */
static uint64_t record_bytes(const psd_table *t, uint64_t n)
{
    const uint64_t rows = n < t->spec.rows_max ? n : t->spec.rows_max, sightings = t->spec.admit_after > 1 ? n : 0;
    return sizeof(psd_record) + (rows > PSD_REMOVED_MAX ? rows : PSD_REMOVED_MAX) * (sizeof(psd_flip) + 4) + sightings * sizeof(psd_flip);
}

/* A word for every fourth row that there may be, up to 8 million: they take memory from the start, since any of them may be stored to. */
static uint64_t sightings_bytes(uint64_t rows_max)
{
    const uint64_t buckets = rows_max / 32 + 64, most = 1u << 20;
    return (buckets < most ? buckets : most) * 64;
}

static const psd_table_calls CALLS = {psd_table_lack,   psd_index_must_move, psd_table_push, psd_table_commit_push, psd_table_read,
                                      psd_sums_prepare, psd_sums_add,        psd_sums_clear};

int psd_table_plan(psd_table *t)
{
    psd_table_spec *const s = &t->spec;
    t->calls = &CALLS;
    s->stored = s->width - (s->is_half ? s->dim / 2 : 0);
    const uint64_t most = s->push_max < s->rows_max ? s->push_max : s->rows_max, places = s->rows_max + most;
    if (places > PSD_PLACES_MAX)
        return 0;
    t->root_bytes = aligned(sizeof(psd_root) + 8 * s->notes, 64);
    const uint64_t index = (places * 2 / PSD_BUCKET + 16) * 64;
    const uint64_t sizes[PSD_REGIONS] = {
        [PSD_CONTROL] = 128 + 2 * t->root_bytes,
        [PSD_RECORD] = record_bytes(t, s->push_max),
        [PSD_SIGHTINGS] = s->admit_after > 1 ? sightings_bytes(s->rows_max) : 0,
        [PSD_INDEX] = index,
        [PSD_OTHER_INDEX] = index,
        [PSD_HEADS] = places * sizeof(psd_head),
        [PSD_ROWS] = places * s->stored * 4,
        [PSD_SPARES] = places * 4,
        [PSD_REMOVALS] = (s->rows_max / 4 + 2 * PSD_REMOVED_MAX) * 8,
        [PSD_LOG] = s->catches_up ? 2 * PSD_LOG_MAX * sizeof(psd_log_entry) : 0,
    };
    uint64_t at = PSD_SUPERBLOCK_BYTES;
    for (int i = 0; i < PSD_REGIONS; i++) {
        t->region[i] = (psd_region){at, sizes[i], 0};
        at = aligned(at + sizes[i], PSD_REGION_ALIGN);
    }
    t->size = at;
    return 1;
}

/* Readers that come one after the other must not keep a push from its commit. */
int psd_table_make_lock(psd_table *t)
{
    pthread_rwlockattr_t attributes;
    pthread_rwlockattr_init(&attributes);
#ifdef __GLIBC__
    pthread_rwlockattr_setkind_np(&attributes, PTHREAD_RWLOCK_PREFER_WRITER_NONRECURSIVE_NP);
#endif
    const int status = pthread_rwlock_init(&t->lock, &attributes);
    pthread_rwlockattr_destroy(&attributes);
    return status;
}

void psd_table_drop_lock(psd_table *t)
{
    pthread_rwlock_destroy(&t->lock);
}

static void attach(psd_table *t)
{
    t->commit = (uint64_t *)(t->base + t->region[PSD_CONTROL].at);
    t->applied = t->commit + 8;
    t->root = root_at(t, *t->commit);
}

void psd_table_format(psd_table *t, uint64_t salt)
{
    attach(t);
    t->root->buckets = 16;
    t->root->salt = salt;
    t->root->check = check_of(t, t->root);
}

psd_root *psd_table_next_root(psd_table *t)
{
    psd_root *const next = root_at(t, *t->commit + 1);
    memcpy(next, t->root, t->root_bytes);
    next->commit = *t->commit + 1;
    next->record = 0;
    return next;
}

psd_record *psd_table_record(psd_table *t)
{
    return (psd_record *)(t->base + t->region[PSD_RECORD].at);
}

static psd_flip *flips_of(psd_record *record)
{
    return (psd_flip *)(record + 1);
}

static uint64_t bytes_of(const psd_record *record)
{
    return sizeof *record + record->flips * sizeof(psd_flip) + record->backs * 4;
}

static uint64_t record_check(const psd_record *record)
{
    psd_content content = {0};
    psd_content_add(&content, record, bytes_of(record));
    return psd_content_check(&content);
}

void psd_table_record_end(psd_table *t, psd_root *next)
{
    next->record = record_check(psd_table_record(t));
}

/* May be repeated, as a whole and from any point of it. */
static void apply_record(psd_table *t)
{
    psd_record *const record = psd_table_record(t);
    if (!t->root->record)
        return;
    const psd_flip *const flips = flips_of(record);
    const uint32_t *const backs = (const uint32_t *)(flips + record->flips);
    for (uint64_t i = 0; i < record->flips; i++) {
        if (i + 8 < record->flips && flips[i + 8].at == 0)
            PSD_PREFETCH(psd_index_home(t, (uint32_t)(flips[i + 8].value >> 32)));
        PSD_BEFORE(t, "flip");
        if (flips[i].at == 0)
            psd_index_place(t, flips[i].value);
        else
            __atomic_store_n((uint64_t *)(t->base + flips[i].at), flips[i].value, __ATOMIC_RELEASE);
    }
    PSD_BEFORE(t, "backs");
    memcpy(psd_spares(t) + record->first_back, backs, record->backs * 4);
}

void psd_table_commit(psd_table *t, psd_root *next)
{
    PSD_BEFORE(t, "root");
    next->check = check_of(t, next);
    PSD_BEFORE(t, "commit");
    pthread_rwlock_wrlock(&t->lock);
    psd_store_release(t->commit, next->commit);
    t->root = next;
    psd_record *const record = psd_table_record(t);
    if (t->snapshot.is_active && next->record)
        psd_snapshot_save(t, record, flips_of(record));
    apply_record(t);
    PSD_BEFORE(t, "applied");
    psd_store_release(t->applied, next->commit);
    pthread_rwlock_unlock(&t->lock);
    PSD_BEFORE(t, "done");
}

void psd_table_commit_push(psd_table *t)
{
    psd_table_commit(t, root_at(t, *t->commit + 1));
}

/* A store beyond its region would be a store into somebody else's memory. */
static int is_sound(psd_table *t)
{
    psd_record *const record = psd_table_record(t);
    if (!t->root->record)
        return 1;
    if (record->flips > t->region[PSD_RECORD].size / sizeof(psd_flip) || record->backs > record->flips
        || bytes_of(record) > t->region[PSD_RECORD].size || record_check(record) != t->root->record)
        return 0;
    if (record->first_back + record->backs > t->region[PSD_SPARES].size / 4)
        return 0;
    const psd_flip *const flips = flips_of(record);
    const uint64_t low = t->region[PSD_INDEX].at, high = t->region[PSD_HEADS].at;
    for (uint64_t i = 0; i < record->flips; i++)
        if (flips[i].at != 0 && (flips[i].at < low || flips[i].at > high - 8 || flips[i].at % 8 != 0))
            return 0;
    return 1;
}

int psd_table_adopt(psd_table *t)
{
    attach(t);
    const psd_root *const r = t->root;
    const uint64_t buckets_max = t->region[PSD_INDEX].size / 64, places_max = t->region[PSD_HEADS].size / sizeof(psd_head);
    if (*t->applied != *t->commit && *t->applied + 1 != *t->commit)
        return psd_table_refuse(t, "applied: it is neither commit nor the one before");
    if (r->commit != *t->commit)
        return psd_table_refuse(t, "root: it is of another commit than the one that selects it");
    if (r->check != check_of(t, r))
        return psd_table_refuse(t, "root: it does not have its checksum");
    if (r->current > 1 || r->buckets == 0 || r->buckets > buckets_max || r->next_buckets > buckets_max || r->places > places_max
        || r->rows + r->spares != r->places || r->moved > (uint64_t)1 << 32 || r->log_end - r->log_first > PSD_LOG_MAX)
        return psd_table_refuse(t, "root: its numbers do not fit the partition");
    if (*t->applied != *t->commit) {
        if (!is_sound(t))
            return psd_table_refuse(t, "record: it does not have its checksum, or names bytes outside of the index or of the spares");
        apply_record(t);
        psd_store_release(t->applied, *t->commit);
    }
    psd_index_clean(t);
    return psd_table_is_whole(t);
}

int psd_table_lack(const psd_table *t, uint64_t n, uint64_t entries, uint64_t *bytes)
{
    const psd_root *const r = t->root;
    const uint64_t most = n < t->spec.rows_max ? n : t->spec.rows_max;
    const uint64_t places = r->rows + (r->spares > most ? r->spares : most);
    const uint64_t taken = r->places > places ? r->places : places;
    uint64_t needed[PSD_REGIONS] = {
        [PSD_CONTROL] = t->region[PSD_CONTROL].size,
        [PSD_RECORD] = record_bytes(t, n),
        [PSD_SIGHTINGS] = t->region[PSD_SIGHTINGS].size,
        [PSD_HEADS] = taken * sizeof(psd_head),
        [PSD_ROWS] = taken * t->spec.stored * 4,
        [PSD_SPARES] = (r->spares + n + PSD_REMOVED_MAX) * 4, /* n rows may go, too, to make room */
    };
    needed[PSD_REMOVALS] = (psd_removals(r) + n + PSD_REMOVED_MAX) * 8;
    needed[PSD_LOG] = (r->log_end + entries + 1) * sizeof(psd_log_entry);
    for (int i = PSD_SPARES; i <= PSD_LOG; i++)
        if (needed[i] > t->region[i].size)
            needed[i] = t->region[i].size;
    needed[PSD_INDEX + r->current] = r->buckets * 64;
    /* The next index is backed as it fills, a step of growth ahead. */
    if (r->next_buckets) {
        const uint64_t ahead = (r->moved * r->next_buckets >> 32) + 4 * PSD_CHUNK_BUCKETS;
        needed[PSD_INDEX + (r->current ^ 1)] = (ahead < r->next_buckets ? ahead : r->next_buckets) * 64;
    }
    for (int i = 0; i < PSD_REGIONS; i++)
        if (t->region[i].backed < needed[i]) {
            *bytes = needed[i];
            return i;
        }
    return -1;
}
