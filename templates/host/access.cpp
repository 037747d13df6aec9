#include <cstdio>

#include "state.hpp"

namespace hadagen::machine {

namespace {

void race(const char* does, i64 offset, const Stamp& other, const char* did) {
    if (m.report->races++) return;
    const char* by = other.by == Stamp::several_threads  ? "other threads"
                     : other.by == Stamp::thread         ? nullptr
                     : other.by == Stamp::copy_under_way ? "a copy under way"
                                                         : "a bulk copy not waited for";
    const Name first(m.running->who), second(by ? 0 : other.who);
    std::snprintf(m.report->first_race, sizeof m.report->first_race,
                  "%s %s byte %lld of shared memory, which %s %s, with no barrier in between", first.text, does, offset,
                  by ? by : second.text, did);
}

// ---- checked memory ------------------------------------------------------------------------------------------------
// The first of the elements that `bytes` at `global` hold. They must lie inside a row of the array and be aligned.
i64 element(const void* global, i64 bytes, const byte* array, i64 pitch, const char* does, const char* name) {
    if (!m.running->synced)
        fail("%s %s %s while the kernel before this one may still be running: no grid_dependency_sync so far",
             Name(m.running->who).text, does, name);
    const i64 offset = i64(global) - i64(array), size = m.launch.element_bytes;
    const i64 first = offset / size, count = bytes / size;
    if (bytes < vector_bytes && bytes != size)
        fail("%s %s an element of %lld bytes, but those of %s have %lld", Name(m.running->who).text, does, bytes, name,
             size);
    if (offset < 0 || first + count > extent(pitch))
        fail("%s %s %lld elements at element %lld of %s, which has %lld", Name(m.running->who).text, does, count, first,
             name, extent(pitch));
    if (pitch > m.launch.columns && first % pitch + count > m.launch.columns)
        fail("%s %s %lld elements at element %lld of a row of %s, which has %lld", Name(m.running->who).text, does,
             count, first % pitch, name, m.launch.columns);
    const i64 address = i64(global), alignment = bytes % vector_bytes ? size : vector_bytes;
    if (address % alignment)
        fail("%s %s %lld elements at byte %lld of %s, whose address is not a multiple of %lld",
             Name(m.running->who).text, does, count, offset, name, alignment);
    return first;
}

void read_global(void* into, const void* global, i64 bytes) {
    const i64 first = element(global, bytes, m.x, m.launch.x_pitch, "loads", "x");
    if (m.x == m.y)
        for (i64 i = first; i < first + bytes / m.launch.element_bytes; ++i)
            if (m.writes[i] && !m.report->races++)
                std::snprintf(m.report->first_race, sizeof m.report->first_race,
                              "%s loads element %lld of x, in place, after its result was stored",
                              Name(m.running->who).text, i);
    std::memcpy(into, global, bytes);
}

// The offset of `shared`, in the running thread's block, of `bytes` that must lie inside its shared memory.
u32 shared_offset(const void* shared, u32 bytes, u32 alignment) {
    const i64 offset = i64(shared) - i64(self->shared);
    if (offset < 0 || offset + bytes > m.launch.shared_bytes)
        fail("%s touches %u bytes at byte %lld of shared memory, of which there are %u", Name(m.running->who).text,
             bytes, offset, m.launch.shared_bytes);
    if (offset % alignment)
        fail("%s touches %u bytes at byte %lld of shared memory, which is not a multiple of %u",
             Name(m.running->who).text, bytes, offset, alignment);
    return u32(offset);
}

bool in_order(const Stamp& access) {
    return happened_before(access, m.running->who, self->rank, m.running->clock);
}

Stamp stamp_now() {
    const Thread& thread = *m.running;
    return {Stamp::thread, thread.who, thread.rank, thread.clock.block_syncs, thread.clock.arrivals};
}

void note_read(u32 offset) {
    Cell& cell = m.block().memory.cells[offset / vector_bytes];
    if (cell.write.by == Stamp::nobody) ++m.report->uninitialized_reads;
    if (!in_order(cell.write)) race("reads", offset, cell.write, "has written");
    Stamp now = stamp_now();
    if (!in_order(cell.read)) {
        now.by = Stamp::several_threads;
        now.arrivals = std::max(now.arrivals, cell.read.arrivals);
    }
    cell.read = now;
}

void note_write(u32 rank, u32 offset, const Stamp& stamp) {
    Cell& cell = m.blocks[rank].memory.cells[offset / vector_bytes];
    if (!in_order(cell.write)) race("writes", offset, cell.write, "has written");
    if (!in_order(cell.read)) race("writes", offset, cell.read, "has read");
    cell = {stamp, Stamp{}};
}

// A copy to shared memory begins: until it has landed, the bytes are nobody's to touch.
void begin_copy(byte* shared, u32 bytes) {
    const u32 offset = shared_offset(shared, bytes, vector_bytes);
    for (u32 at = 0; at < bytes; at += vector_bytes)
        note_write(self->rank, offset + at, {Stamp::copy_under_way, m.running->who, self->rank});
    SharedMemory::poison(shared, bytes);
}

void end_copy(byte* shared, const void* global, u32 bytes, const Stamp& stamp) {
    read_global(shared, global, bytes);
    for (u32 at = 0; at < bytes; at += vector_bytes) m.block().memory.cell(shared + at).write = stamp;
}

u32 barrier_at(const u64* address) {
    const auto& barriers = m.block().memory.barriers;
    for (u32 b = 0; b < barriers.size(); ++b)
        if (barriers[b].address == address) {
            note_read(shared_offset(address, sizeof *address, sizeof *address));
            return b;
        }
    fail("%s uses an mbarrier that was not initialized", Name(m.running->who).text);
}

}  // namespace

// ---- primitives ----------------------------------------------------------------------------------------------------
void grid_dependency_sync() { m.running->synced = true; }

void load(void* into, const void* global, i64 bytes) {
    step();
    read_global(into, global, bytes);
    if (bytes == vector_bytes) m.warp().global.add(self->thread % warp_lanes, i64(global) - i64(m.x));
}

void store(void* global, const void* from, i64 bytes) {
    step();
    const i64 first = element(global, bytes, m.y, m.launch.y_pitch, "stores", "y");
    for (i64 i = first; i < first + bytes / m.launch.element_bytes; ++i) m.writes[i] += m.writes[i] < 2;
    std::memcpy(global, from, bytes);
    if (bytes == vector_bytes) m.warp().global.add(self->thread % warp_lanes, i64(global) - i64(m.y));
}

Vec16 shared_load(const byte* shared) {
    step();
    const u32 offset = shared_offset(shared, vector_bytes, vector_bytes);
    note_read(offset);
    m.warp().shared.add(self->thread % warp_lanes, offset);
    Vec16 v;
    std::memcpy(&v, shared, sizeof v);
    return v;
}

void shared_store(byte* shared, u32 rank, const Vec16& v) {
    step();
    const u32 offset = shared_offset(shared, vector_bytes, vector_bytes);
    if (rank >= m.launch.cluster)
        fail("%s stores to block %u of a cluster of %u", Name(m.running->who).text, rank, m.launch.cluster);
    const Clock& clock = m.running->clock;
    if (rank != self->rank) {
        if (clock.waits == 0)
            fail("%s stores into the shared memory of another block, which may not have begun: no cluster_wait so far",
                 Name(m.running->who).text);
        m.blocks[rank].written_until = std::max(m.blocks[rank].written_until, clock.arrivals + 1);
    }
    note_write(rank, offset, stamp_now());
    m.warp().shared.add(self->thread % warp_lanes, i64(rank) * m.launch.shared_bytes / 128 * 128 + offset);
    std::memcpy(m.blocks[rank].memory.base + offset, &v, sizeof v);
}

void copy_async(byte* shared, const void* global) {
    step();
    begin_copy(shared, vector_bytes);
    element(global, vector_bytes, m.x, m.launch.x_pitch, "loads", "x");
    m.running->copies.push_back({shared, global, m.running->groups});
    m.warp().shared.add(self->thread % warp_lanes, shared - self->shared);
    m.warp().global.add(self->thread % warp_lanes, i64(global) - i64(m.x));
}

void copy_async_commit() { ++m.running->groups; }

void copy_async_wait(u32 pending) {
    step();
    auto& copies = m.running->copies;
    const auto landed = [&](const AsyncCopy& copy) { return copy.group + pending < m.running->groups; };
    for (const AsyncCopy& copy : copies)
        if (landed(copy)) end_copy(copy.shared, copy.global, vector_bytes, stamp_now());
    copies.erase(std::remove_if(copies.begin(), copies.end(), landed), copies.end());
}

void barrier_init(const u64* barrier) {
    step();
    const u32 offset = shared_offset(barrier, sizeof *barrier, sizeof *barrier);
    auto& barriers = m.block().memory.barriers;
    for (const Barrier& other : barriers)
        if (other.address == barrier) fail("%s initializes an mbarrier again", Name(m.running->who).text);
    if (barriers.size() == max_barriers) fail("a block has more than %d mbarriers", max_barriers);
    note_write(self->rank, offset, stamp_now());
    barriers.push_back({barrier});
}

void bulk_copy(byte* shared, const void* global, u32 bytes, const u64* barrier) {
    step();
    const u32 b = barrier_at(barrier);
    Barrier& state = m.block().memory.barriers[b];
    if (bytes == 0 || bytes % vector_bytes)
        fail("%s copies %u bytes, which is not a multiple of %u", Name(m.running->who).text, bytes, vector_bytes);
    if (state.under_way || !in_order(state.ended))
        fail("%s starts a bulk copy before it knows that the last one has landed", Name(m.running->who).text);
    begin_copy(shared, bytes);
    element(global, bytes, m.x, m.launch.x_pitch, "loads", "x");
    state.under_way = true;
    state.copy = {shared, global, bytes};
    const u32 first = self->rank * m.launch.threads;
    for (u32 t = first; t < first + m.launch.threads; ++t)
        if (m.threads[t].waits_at == at_barrier_wait) make_ready(m.threads[t]);
}

void barrier_wait(const u64* barrier, u32 parity) {
    step();
    const u32 b = barrier_at(barrier);
    Barrier& state = m.block().memory.barriers[b];
    while (state.phases % 2 == parity) {
        if (state.under_way) {
            state.under_way = false;
            state.ended = stamp_now();
            state.ended.by = Stamp::bulk_copy;
            state.ended.barrier = b;
            state.ended.phase = ++state.phases;
            end_copy(state.copy.shared, state.copy.global, state.copy.bytes, state.ended);
        } else {
            m.running->waits_at = at_barrier_wait;
            pause();
        }
    }
    u32& landed = m.running->clock.landed[b];
    landed = std::max(landed, state.phases);
}

}  // namespace hadagen::machine
