#include <cstdio>
#include <limits>

#include "state.hpp"

namespace hadagen::machine {

namespace {

void race(const char* does, i64 offset, const Stamp& other, const char* did) {
    if (m.report->races++) return;
    const char* by = other.by == Stamp::several_threads  ? "other threads"
                     : other.by == Stamp::thread         ? nullptr
                     : other.by == Stamp::copy_under_way ? "a copy under way"
                     : other.by == Stamp::product_under_way ? "a product under way"
                                                            : "a copy not waited for";
    const Name first(m.running->who), second(by ? 0 : other.who);
    std::snprintf(m.report->first_race, sizeof m.report->first_race,
                  "%s %s byte %lld of shared memory, which %s %s, with no barrier in between", first.text, does, offset,
                  by ? by : second.text, did);
}

// ---- checked memory ------------------------------------------------------------------------------------------------
void check_synced(const char* does, const char* name) {
    if (!m.running->synced)
        fail("%s %s %s while the kernel before this one may still be running: no grid_dependency_sync so far",
             Name(m.running->who).text, does, name);
}

// Whether `bytes` at `global` lie inside what a kernel may read besides x.
bool in_operand(const void* global, i64 bytes) {
    for (u64 i = 0; i < m.launch.operand_count; ++i) {
        const Operand& operand = m.launch.operands[i];
        const i64 offset = i64(global) - i64(operand.at);
        if (offset >= 0 && offset + bytes <= operand.bytes) return true;
    }
    return false;
}

// The first of the elements that `bytes` at `global` hold. They must lie inside a row of the array and be aligned.
i64 element(const void* global, i64 bytes, const Array& array, const char* does) {
    check_synced(does, array.name);
    const i64 offset = i64(global) - i64(array.at), size = m.launch.element_bytes;
    const i64 first = offset / size, count = bytes / size;
    if (bytes < vector_bytes && bytes != size && bytes != 8)
        fail("%s %s an element of %lld bytes, but those of %s have %lld", Name(m.running->who).text, does, bytes,
             array.name, size);
    if (offset < 0 || first + count > array.elements)
        fail("%s %s %lld elements at element %lld of %s, which has %lld", Name(m.running->who).text, does, count, first,
             array.name, array.elements);
    if (array.pitch > m.launch.columns && first % array.pitch + count > m.launch.columns)
        fail("%s %s %lld elements at element %lld of a row of %s, which has %lld", Name(m.running->who).text, does,
             count, first % array.pitch, array.name, m.launch.columns);
    const i64 address = i64(global), alignment = bytes % vector_bytes ? bytes : vector_bytes;
    if (address % alignment)
        fail("%s %s %lld elements at byte %lld of %s, whose address is not a multiple of %lld",
             Name(m.running->who).text, does, count, offset, array.name, alignment);
    return first;
}

void read_global(void* into, const void* global, i64 bytes) {
    if (in_operand(global, bytes)) {
        check_synced("loads", "an operand");
        std::memcpy(into, global, bytes);
        return;
    }
    const i64 first = element(global, bytes, m.x, "loads");
    if (m.in_place())
        for (i64 i = first; i < first + bytes / m.launch.element_bytes; ++i) {
            if (m.writes[i] && !m.report->races++)
                std::snprintf(m.report->first_race, sizeof m.report->first_race,
                              "%s loads element %lld of x, in place, after its result was stored",
                              Name(m.running->who).text, i);
            Loaded& loaded = m.loaded[i];
            loaded.by = loaded.by == Loaded::by_nobody || loaded.by == self->block ? self->block : Loaded::by_several;
            loaded.arrivals = std::max(loaded.arrivals, m.running->clock.arrivals);
        }
    std::memcpy(into, global, bytes);
}

// Whether `bytes` at `global` are of an output, and then stores them.
bool wrote_output(void* global, const void* from, i64 bytes) {
    for (u64 i = 0; i < m.launch.output_count; ++i) {
        const Output& output = m.launch.outputs[i];
        const i64 offset = i64(global) - i64(output.at);
        if (offset < 0 || offset + bytes > output.bytes) continue;
        check_synced("stores", "an output");
        if (i64(global) % bytes)
            fail("%s stores %lld bytes at byte %lld of an output, whose address is not a multiple of that",
                 Name(m.running->who).text, bytes, offset);
        for (i64 at = offset; at < offset + bytes; ++at) m.output_writes[i][at] += m.output_writes[i][at] < 2;
        std::memcpy(global, from, bytes);
        return true;
    }
    return false;
}

// A result is stored, in place or not. If one block of the cluster alone has loaded what lay there, that had to come to
// the result. If several have, only the cluster barrier says that all of them did. Nothing says it of another cluster.
bool may_replace(const Loaded& loaded) {
    if (loaded.by == Loaded::by_several) return loaded.arrivals < m.running->clock.waits;
    return loaded.by == Loaded::by_nobody || loaded.by / m.launch.cluster == self->block / m.launch.cluster;
}

void write_global(void* global, const void* from, i64 bytes) {
    if (wrote_output(global, from, bytes)) return;
    if (!m.y.at) fail("%s stores %lld bytes beyond the outputs", Name(m.running->who).text, bytes);
    const i64 first = element(global, bytes, m.y, "stores");
    for (i64 i = first; i < first + bytes / m.launch.element_bytes; ++i) {
        m.writes[i] += m.writes[i] < 2;
        if (m.in_place() && !may_replace(m.loaded[i]) && !m.report->races++)
            std::snprintf(m.report->first_race, sizeof m.report->first_race,
                          "%s stores element %lld of y, in place, which other blocks have loaded, with no barrier in "
                          "between",
                          Name(m.running->who).text, i);
    }
    std::memcpy(global, from, bytes);
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

bool in_order(const Stamp& access, const Thread& thread = *m.running) {
    return happened_before(access, thread.who, thread.rank, thread.clock);
}

Stamp stamp_now() {
    const Thread& thread = *m.running;
    return {Stamp::thread,          thread.who,
            thread.rank,            1u << thread.clock.warp,
            thread.clock.warp_syncs, thread.clock.block_syncs, thread.clock.arrivals,
            u32(thread.fences.size())};
}

// The cells of so many bytes.
template <class Note> void for_cells(u32 rank, u32 offset, u32 bytes, Note note) {
    for (u32 at = offset; at < offset + bytes; at += word_bytes) note(m.blocks[rank].memory.cells[at / word_bytes], at);
}

void note_read(u32 rank, u32 offset, u32 bytes, bool of_products = false) {
    i64 uninitialized = -1;  // the first such byte
    Stamp stamp = stamp_now();
    stamp.of_products = of_products;
    for_cells(rank, offset, bytes, [&](Cell& cell, u32 at) {
        if (cell.write.by == Stamp::nobody && uninitialized < 0) uninitialized = at;
        if (!in_order(cell.write)) race("reads", at, cell.write, "has written");
        Stamp now = stamp;
        if (!in_order(cell.read)) {
            now.by = Stamp::several_threads;
            now.warps |= cell.read.warps;
            now.warp_syncs = std::max(now.warp_syncs, cell.read.warp_syncs);
            now.fences = std::max(now.fences, cell.read.fences);
            now.arrivals = std::max(now.arrivals, cell.read.arrivals);
            now.of_products &= cell.read.of_products;
        }
        cell.read = now;
    });
    if (uninitialized < 0 || m.report->uninitialized_reads++) return;
    std::snprintf(m.report->first_uninitialized_read, sizeof m.report->first_uninitialized_read,
                  "%s reads byte %lld of shared memory, which was never written in its block%s%s",
                  Name(m.running->who).text, uninitialized, *m.running->plan_step ? ", in step " : "",
                  m.running->plan_step);
}

void note_write(u32 rank, u32 offset, u32 bytes, const Stamp& stamp) {
    for (const Span& boxes : m.blocks[rank].memory.multiplied)
        if (offset < boxes.offset + boxes.bytes && boxes.offset < offset + bytes)
            race("writes", offset, {Stamp::product_under_way}, "reads");
    for_cells(rank, offset, bytes, [&](Cell& cell, u32 at) {
        if (!in_order(cell.write)) race("writes", at, cell.write, "has written");
        if (!in_order(cell.read)) race("writes", at, cell.read, "has read");
        cell = {stamp, Stamp{}};
    });
}

// Another block is stored or copied to.
void reach(u32 rank, const char* does) {
    if (rank >= m.launch.cluster)
        fail("%s %s block %u of a cluster of %u", Name(m.running->who).text, does, rank, m.launch.cluster);
    if (rank != self->rank && m.running->clock.waits == 0)
        fail("%s %s another block, which may not have begun: no cluster_wait so far", Name(m.running->who).text, does);
}

// A copy to the shared memory of block `rank` begins: until it has landed, the bytes are nobody's to touch.
void begin_copy(u32 rank, byte* shared, u32 bytes) {
    const u32 offset = shared_offset(shared, bytes, vector_bytes);
    note_write(rank, offset, bytes, {Stamp::copy_under_way, m.running->who, self->rank});
    SharedMemory::poison(m.blocks[rank].memory.base + offset, bytes);
    m.running->touched_shared = true;
}

void end_copy(const Arrival& arrival, const Stamp& stamp) {
    if (arrival.shared_bytes) {
        if (arrival.shared_bytes->empty()) {
            arrival.shared_bytes->resize(arrival.bytes);
            read_global(arrival.shared_bytes->data(), arrival.global, arrival.bytes);
        }
        std::memcpy(arrival.shared, arrival.shared_bytes->data(), arrival.bytes);
    } else if (arrival.global) read_global(arrival.shared, arrival.global, arrival.bytes);
    else std::memcpy(arrival.shared, &arrival.vector, sizeof arrival.vector);
    const u32 offset = u32(arrival.shared - m.block().memory.base);
    for_cells(self->rank, offset, arrival.bytes, [&](Cell& cell, u32) { cell.write = stamp; });
}

// A thread of block `rank` that may have made this access and has called no bulk_copy_fence since that `next` comes after;
// null where there is none.
const Thread* unfenced(u32 rank, const Stamp& access, const Thread& next = *m.running) {
    const auto is_unfenced = [&](const Thread& thread) {
        return thread.fences.size() <= access.fences || !in_order(thread.fences[access.fences], next);
    };
    if (access.of_products) return nullptr;
    if (access.by == Stamp::thread) return is_unfenced(m.threads[access.who]) ? &m.threads[access.who] : nullptr;
    if (access.by != Stamp::several_threads) return nullptr;
    const auto first = m.threads.begin() + rank * m.launch.threads, end = first + m.launch.threads;
    const auto found = std::find_if(first, end, [&](const Thread& thread) {
        return access.warps >> thread.clock.warp & 1 && is_unfenced(thread);
    });
    return found == end ? nullptr : &*found;
}

// A bulk copy to the shared memory of block `rank` begins.
void begin_bulk_copy(u32 rank, byte* shared, const void* global, u32 bytes) {
    const u32 offset = shared_offset(shared, bytes, vector_bytes);
    for_cells(rank, offset, bytes, [&](const Cell& cell, u32 at) {
        if (!in_order(cell.read) || !in_order(cell.write)) return;  // a race, as begin_copy will find
        for (const Stamp& access : {cell.read, cell.write})
            if (const Thread* const toucher = unfenced(rank, access))
                fail("%s copies over byte %u of shared memory, which %s has touched with no bulk_copy_fence since",
                     Name(m.running->who).text, at, Name(toucher->who).text);
    });
    begin_copy(rank, shared, bytes);
    element(global, bytes, m.x, "loads");
}

void check_whole_vectors(u32 bytes, const char* does) {
    if (bytes == 0 || bytes % vector_bytes)
        fail("%s %s %u bytes, which is not a multiple of %u", Name(m.running->who).text, does, bytes, vector_bytes);
}

// The number of the barrier that lies in block `rank` where `address` lies in the running thread's.
u32 barrier_at(u32 rank, const u64* address) {
    const u32 offset = shared_offset(address, sizeof *address, sizeof *address);
    const SharedMemory& memory = m.blocks[rank].memory;
    for (u32 b = 0; b < memory.barriers.size(); ++b)
        if (reinterpret_cast<const byte*>(memory.barriers[b].address) == memory.base + offset) {
            note_read(rank, offset, sizeof *address);
            return b;
        }
    fail("%s uses an mbarrier that was not initialized", Name(m.running->who).text);
}

// Those who wait at a barrier of block `rank` look again.
void wake(u32 rank) {
    const u32 first = rank * m.launch.threads;
    for (u32 t = first; t < first + m.launch.threads; ++t)
        if (m.threads[t].waits_at == at_barrier_wait) make_ready(m.threads[t]);
}

// Bytes are on their way to a barrier of block `rank`.
void send(u32 rank, Barrier& barrier, const Arrival& arrival) {
    barrier.arrivals.push_back(arrival);
    barrier.came += arrival.bytes;
    wake(rank);
}

// ---- products ------------------------------------------------------------------------------------------------------
constexpr u32 box_columns = 64, box_row_bytes = 128, step_rows = 16;  // rows of a box for each step
constexpr u32 swizzled_alignment = 1024;  // of boxes

// The boxes that a warp's latest product reads.
Span boxes_read(const Thread* lanes) {
    const Product& first = lanes[0].products.back();
    const u32 bytes = first.planes * 2 * first.count / box_columns * step_rows * first.steps * box_row_bytes;
    return {shared_offset(first.boxes, bytes, swizzled_alignment / 8), bytes};
}

// They must be those of all lanes, and of the warps that carry out the product together.
void check_boxes(const Thread* lanes) {
    const byte* const boxes = lanes[0].products.back().boxes;
    for (u32 lane = 0; lane < warp_lanes; ++lane)
        if (lanes[lane].products.back().boxes != boxes)
            fail("%s multiplies other boxes than its warp", Name(lanes[lane].who).text);
    if (reinterpret_cast<u64>(boxes) % swizzled_alignment)
        fail("%s multiplies boxes at byte %lld of shared memory, whose address is not a multiple of %u",
             Name(lanes[0].who).text, i64(boxes - self->shared), swizzled_alignment);
    if (m.launch.threads % (product_warps * warp_lanes))
        fail("a product takes %d warps; a block has %u threads", product_warps, m.launch.threads);
    auto& mine = m.warp().multiplied;
    mine.push_back(boxes);
    const Warp* const together = &m.warps[lanes[0].who / warp_lanes / product_warps * product_warps];
    for (u32 warp = 0; warp < product_warps; ++warp)
        if (together[warp].multiplied.size() >= mine.size() && together[warp].multiplied[mine.size() - 1] != boxes)
            fail("%s multiplies other boxes than the warps beside it", Name(lanes[0].who).text);
}

// Lanes that stand for all of a warp: two, because one may have made an access itself, and those that know other things.
std::vector<const Thread*> views(const Thread* lanes) {
    std::vector<const Thread*> found{&lanes[0], &lanes[1]};
    for (u32 lane = 2; lane < warp_lanes; ++lane)
        if (!lanes[lane].clock.knows_as_much_as(lanes[0].clock)) found.push_back(&lanes[lane]);
    return found;
}

// A lane's operand of a step is that of mma.m16n8k16. Its sums are those of rows lane / 4, then those of rows lane / 4 + 8;
// of each, two neighbors of every eight columns.
void multiply_boxes(Thread* lanes) {
    const Product& first = lanes[0].products.back();
    const u32 columns = 2 * first.count, depth = step_rows * first.steps;
    std::vector<double> a(16 * depth), sums(16 * columns);
    for (u32 lane = 0; lane < warp_lanes; ++lane) {
        const Product& mine = lanes[lane].products.back();
        for (u32 i = 0; i < 8 * mine.steps * mine.pieces; ++i) {
            const u32 word = i / 2, step = word / 4 % mine.steps;
            const u32 row = lane / 4 + 8 * (word % 2), column = 16 * step + 2 * (lane % 4) + i % 2 + 8 * (word / 2 % 2);
            a[row * depth + column] += mine.decode(u16(mine.words[word] >> 16 * (i % 2)));
        }
    }
    for (u32 k = 0; k < depth; ++k)
        for (u32 column = 0; column < columns; ++column) {
            const u32 within = column % box_columns, vector = within / 8 ^ k % 8;
            double x = 0.0;
            for (u32 plane = 0; plane < first.planes; ++plane) {
                const u32 box = plane * (columns / box_columns) + column / box_columns;
                u16 bits;
                std::memcpy(&bits, first.boxes + (box * depth + k) * box_row_bytes + 16 * vector + 2 * (within % 8), 2);
                x += first.decode(bits);
            }
            for (u32 row = 0; row < 16; ++row) sums[row * columns + column] += a[row * depth + k] * x;
        }
    for (u32 lane = 0; lane < warp_lanes; ++lane) {
        const Product& mine = lanes[lane].products.back();
        for (u32 i = 0; i < mine.count; ++i) {
            const u32 within = i % (mine.count / 2), row = lane / 4 + 8 * (i / (mine.count / 2));
            mine.sums[i] = float(sums[row * columns + within / 2 * 8 + 2 * (lane % 4) + within % 2]);
        }
    }
}

}  // namespace

// ---- primitives ----------------------------------------------------------------------------------------------------
void grid_dependency_sync() { m.running->synced = true; }
void trigger_dependents() { step(); }

void load(void* into, const void* global, i64 bytes) {
    step();
    read_global(into, global, bytes);
    if (bytes == vector_bytes) m.warp().global.add(self->thread % warp_lanes, i64(global) - i64(m.x.at));
}

void store(void* global, const void* from, i64 bytes) {
    step();
    write_global(global, from, bytes);
    if (bytes == vector_bytes) m.warp().global.add(self->thread % warp_lanes, i64(global) - i64(m.y.at));
}

Vec16 shared_load(const byte* shared) {
    step();
    const u32 offset = shared_offset(shared, vector_bytes, vector_bytes);
    note_read(self->rank, offset, vector_bytes);
    m.running->touched_shared = true;
    m.warp().shared.add(self->thread % warp_lanes, offset);
    Vec16 v;
    std::memcpy(&v, shared, sizeof v);
    return v;
}

void shared_store(byte* shared, const void* from, u32 bytes) {
    step();
    const u32 offset = shared_offset(shared, bytes, bytes);
    note_write(self->rank, offset, bytes, stamp_now());
    m.running->touched_shared = true;
    m.warp().shared.add(self->thread % warp_lanes, offset, bytes);
    std::memcpy(shared, from, bytes);
}

void copy_async(byte* shared, const void* global) {
    step();
    begin_copy(self->rank, shared, vector_bytes);
    m.running->copies.push_back({shared, global, m.running->groups});
    m.warp().shared.add(self->thread % warp_lanes, shared - self->shared);
    if (!global) return;  // zeros
    element(global, vector_bytes, m.x, "loads");
    m.warp().global.add(self->thread % warp_lanes, i64(global) - i64(m.x.at));
}

void copy_async_commit() { ++m.running->groups; }

void copy_async_wait(u32 pending) {
    step();
    auto& copies = m.running->copies;
    const auto landed = [&](const AsyncCopy& copy) { return copy.group + pending < m.running->groups; };
    for (const AsyncCopy& copy : copies)
        if (landed(copy)) end_copy({copy.shared, copy.global, vector_bytes}, stamp_now());
    copies.erase(std::remove_if(copies.begin(), copies.end(), landed), copies.end());
}

void barrier_init(const u64* barrier) {
    step();
    const u32 offset = shared_offset(barrier, sizeof *barrier, sizeof *barrier);
    auto& barriers = m.block().memory.barriers;
    for (const Barrier& other : barriers)
        if (other.address == barrier) fail("%s initializes an mbarrier again", Name(m.running->who).text);
    if (barriers.size() == max_barriers) fail("a block has more than %d mbarriers", max_barriers);
    note_write(self->rank, offset, sizeof *barrier, stamp_now());
    barriers.push_back({barrier});
}

void barrier_init(const u64* barrier, u32 arrivals) {
    barrier_init(barrier);
    if (!arrivals) fail("%s initializes an mbarrier for no arrivals", Name(m.running->who).text);
    m.block().memory.barriers.back().needed = arrivals;
}

void barrier_arrive(const u64* barrier) {
    step();
    Barrier& state = m.block().memory.barriers[barrier_at(self->rank, barrier)];
    const Clock& clock = m.running->clock;
    if (!state.needed) fail("%s arrives at an mbarrier that waits for bytes", Name(m.running->who).text);
    Known mine = clock.known;
    mine.warp_syncs[clock.warp] = clock.warp_syncs;
    state.arrived.add(mine);
    if (++state.arrived_so_far < state.needed) return;
    state.known = state.arrived;
    state.arrived_so_far = 0;
    ++state.phases;
    wake(self->rank);
}

void barrier_expect(const u64* barrier, u32 bytes) {
    step();
    Barrier& state = m.block().memory.barriers[barrier_at(self->rank, barrier)];
    check_whole_vectors(bytes, "expects");
    if (state.needed) fail("%s expects bytes at an mbarrier that counts arrivals", Name(m.running->who).text);
    if (state.expected || !in_order(state.ended))
        fail("%s expects bytes at an mbarrier before it knows that the last ones have landed",
             Name(m.running->who).text);
    state.expected = bytes;
    wake(self->rank);
}

void bulk_copy_fence() {
    step();
    m.running->fences.push_back(stamp_now());
}

void bulk_prefetch(const void* global, u32 bytes) {
    step();
    check_whole_vectors(bytes, "prefetches");
    element(global, bytes, m.x, "prefetches");
    m.report->prefetched_bytes += bytes;
}

void bulk_copy(byte* shared, const void* global, u32 bytes, const u64* barrier) {
    step();
    begin_bulk_copy(self->rank, shared, global, bytes);
    send(self->rank, m.block().memory.barriers[barrier_at(self->rank, barrier)], {shared, global, bytes});
}

void bulk_multicast(byte* shared, const void* global, u32 bytes, const u64* barrier, u32 blocks) {
    step();
    check_whole_vectors(bytes, "copies");
    const u32 offset = shared_offset(shared, bytes, vector_bytes);
    const auto read_once = std::make_shared<std::vector<byte>>();
    for (u32 rank = 0; rank < blocks; ++rank) {
        reach(rank, "copies to");
        begin_bulk_copy(rank, shared, global, bytes);
        SharedMemory& memory = m.blocks[rank].memory;
        send(rank, memory.barriers[barrier_at(rank, barrier)], {memory.base + offset, global, bytes, {}, read_once});
    }
}

void remote_shared_store(byte* shared, u32 rank, const Vec16& v, const u64* barrier) {
    step();
    const u32 offset = shared_offset(shared, vector_bytes, vector_bytes);
    reach(rank, "stores to");
    begin_copy(rank, shared, vector_bytes);
    m.warp().shared.add(self->thread % warp_lanes, i64(rank) * m.launch.shared_bytes / 128 * 128 + offset);
    SharedMemory& memory = m.blocks[rank].memory;
    send(rank, memory.barriers[barrier_at(rank, barrier)], {memory.base + offset, nullptr, vector_bytes, v});
}

void barrier_wait(const u64* barrier, u32 parity, bool remote) {
    step();
    const u32 b = barrier_at(self->rank, barrier);
    Barrier& state = m.block().memory.barriers[b];
    while (state.phases % 2 == parity) {
        if (state.expected && state.came == state.expected) {
            state.ended = stamp_now();
            state.ended.by = Stamp::landed;
            state.ended.barrier = b;
            state.ended.phase = ++state.phases;
            state.stored = std::any_of(state.arrivals.begin(), state.arrivals.end(), [](auto& a) { return !a.global; });
            for (const Arrival& arrival : state.arrivals) end_copy(arrival, state.ended);
            state.arrivals.clear();
            state.expected = state.came = 0;
        } else {
            m.running->waits_at = at_barrier_wait;
            pause();
        }
    }
    if (state.stored && !remote)
        fail("%s waits with barrier_wait for what blocks have stored; only remote_barrier_wait shows it",
             Name(m.running->who).text);
    Known& known = m.running->clock.known;
    known.add(state.known);
    known.landed[b] = std::max(known.landed[b], state.phases);
}

void begin_product(const Product& product) {
    std::fill(product.sums, product.sums + product.count, std::numeric_limits<float>::quiet_NaN());
    m.running->products.push_back(product);
    meet_warp(at_product, nullptr, [](Thread* lanes) {
        check_boxes(lanes);
        const Span read = boxes_read(lanes);
        for (const Thread* lane : views(lanes))
            for_cells(self->rank, read.offset, read.bytes, [&](const Cell& cell, u32 at) {
                if (!in_order(cell.write, *lane)) race("multiplies", at, cell.write, "has written");
                else if (const Thread* const writer = unfenced(self->rank, cell.write, *lane))
                    fail("%s multiplies byte %u of shared memory, which %s has written with no bulk_copy_fence since",
                         Name(m.running->who).text, at, Name(writer->who).text);
            });
        m.block().memory.multiplied.push_back(read);
    });
}

void end_product(const float* sums) {
    if (m.running->products.empty() || m.running->products.back().sums != sums)
        fail("%s waits for another product than its last", Name(m.running->who).text);
    meet_warp(at_product_end, nullptr, [](Thread* lanes) {
        const Span read = boxes_read(lanes);
        auto& multiplied = m.block().memory.multiplied;
        multiplied.erase(std::find_if(multiplied.begin(), multiplied.end(), [&](const Span& each) {
            return each.offset == read.offset && each.bytes == read.bytes;
        }));
        note_read(self->rank, read.offset, read.bytes, true);
        multiply_boxes(lanes);
        for (u32 lane = 0; lane < warp_lanes; ++lane) lanes[lane].products.pop_back();
    });
}

}  // namespace hadagen::machine
