#include "machine.hpp"

#include <cstdarg>
#include <cstdio>

#include "fiber.hpp"
#include "memory.hpp"

namespace hadagen::machine {

const Identity* self;

namespace {

// Where a thread waits; compared as pointers.
constexpr char at_shuffle[] = "shuffle", at_mma[] = "mma", at_block_sync[] = "block_sync",
               at_cluster_wait[] = "cluster_wait", at_barrier_wait[] = "barrier_wait", ended[] = "ended";

struct AsyncCopy {
    byte* shared;
    const void* global;
    u32 group;
};

struct Thread : Identity {
    Fiber fiber;
    u32 who;               // number in the cluster
    Clock clock;
    const char* waits_at;  // or null
    void* operand;         // of a warp's collective, on this thread's stack
    std::vector<AsyncCopy> copies;
    u32 groups;  // of copies committed
};

struct Warp {
    u32 waiting = 0;
    const char* meets_at = nullptr;
    WarpAccesses shared, global;
};

struct Block {
    SharedMemory memory;
    u32 waiting = 0;
    u32 written_until = 0;  // arrivals at the cluster barrier by which other blocks' stores into this one are over
};

struct Machine {
    Kernel kernel;
    Launch launch;
    Report* report;
    const byte* x;
    byte* y;
    std::vector<byte> writes;  // of each element of y, up to 2

    std::vector<Thread> threads;  // of the cluster
    std::vector<Warp> warps;
    std::vector<Block> blocks;
    u32 arrived, phases;  // of the cluster barrier

    Thread* running;
    std::vector<Thread*> ready;
    u32 unfinished;
    i64 steps;
    u64 random;
    std::jmp_buf done;

    u32 cluster_threads() const { return launch.threads * launch.cluster; }
    Block& block() { return blocks[running->rank]; }
    Warp& warp() { return warps[running->who / warp_lanes]; }
};
Machine m;

// ---- what went wrong -----------------------------------------------------------------------------------------------
// Ends the launch. Every thread is left where it is.
[[noreturn, gnu::format(printf, 1, 2)]] void fail(const char* format, ...) {
    va_list values;
    va_start(values, format);
    std::vsnprintf(m.report->error, sizeof m.report->error, format, values);
    va_end(values);
    _longjmp(m.done, 1);
}

// "thread 5 of block 0", for messages.
struct Name {
    char text[48];
    explicit Name(u32 who) {
        const Thread& thread = m.threads[who];
        std::snprintf(text, sizeof text, "thread %u of block %lld", thread.thread, thread.block);
    }
};

// "threads 0-31 of block 0 wait at mma; …": neighbours that are at the same place together.
struct Whereabouts {
    char text[512] = "";
    Whereabouts() {
        int groups = 0;
        size_t used = 0;
        for (u32 first = 0, next; first < m.cluster_threads(); first = next) {
            const Thread& thread = m.threads[first];
            for (next = first + 1; next < m.cluster_threads(); ++next)
                if (m.threads[next].rank != thread.rank || m.threads[next].waits_at != thread.waits_at) break;
            if (++groups > 6) {
                std::snprintf(text + used, sizeof text - used, "; …");
                return;
            }
            used += std::snprintf(text + used, sizeof text - used, "%sthreads %u-%u of block %lld %s%s",
                                  used ? "; " : "", thread.thread, thread.thread + (next - first) - 1, thread.block,
                                  thread.waits_at == ended ? "have " : thread.waits_at ? "wait at " : "run",
                                  thread.waits_at ? thread.waits_at : "");
        }
    }
};

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

void step() {
    if (++m.steps > m.launch.steps) fail("the kernel does not end: %lld calls of primitives so far", m.steps);
}

// ---- scheduling ----------------------------------------------------------------------------------------------------
[[noreturn]] void run_next() {
    if (m.ready.empty()) {
        if (m.unfinished) fail("the kernel hangs: %s", Whereabouts().text);
        _longjmp(m.done, 1);
    }
    if (m.launch.seed > 1) {
        m.random = m.random * 6364136223846793005u + 1442695040888963407u;
        std::swap(m.ready.back(), m.ready[(m.random >> 33) % m.ready.size()]);
    }
    m.running = m.ready.back();
    m.ready.pop_back();
    self = m.running;
    m.running->fiber.resume();
}

// Continues when the running thread is made ready again.
void pause() {
    if (!_setjmp(m.running->fiber.place)) run_next();
}

void make_ready(Thread& thread) {
    thread.waits_at = nullptr;
    m.ready.push_back(&thread);
}

// Seed 0 runs threads in order, each as far as it comes; seed 1 the other way round; any other at random.
void make_ready(u32 first, u32 count) {
    for (u32 i = 0; i < count; ++i) make_ready(m.threads[m.launch.seed == 1 ? first + i : first + count - 1 - i]);
}

void run_kernel() {
    m.kernel(m.x, m.y, m.launch.elements, m.launch.scale);
    m.running->waits_at = ended;
    --m.unfinished;
    run_next();
}

// ---- collectives ---------------------------------------------------------------------------------------------------
void count_accesses(Warp& warp) {
    warp.shared.flush([](const WarpAccesses::Row& row) { count_wavefronts(row, *m.report); });
    warp.global.flush([](const WarpAccesses::Row& row) { count_sectors(row, *m.report); });
}

// The last lane to come carries out `together` for all of them.
void meet_warp(const char* where, void* operand, void (*together)(Thread* lanes)) {
    step();
    Warp& warp = m.warp();
    Thread& thread = *m.running;
    thread.operand = operand;
    thread.waits_at = where;
    if (warp.waiting && warp.meets_at != where) fail("a warp diverges: %s", Whereabouts().text);
    warp.meets_at = where;
    if (++warp.waiting == warp_lanes) {
        const u32 first = thread.who / warp_lanes * warp_lanes;
        warp.waiting = 0;
        together(&m.threads[first]);
        count_accesses(warp);
        make_ready(first, warp_lanes);
    }
    pause();
}

struct Shuffle {
    u32 value, from_lane;
};

struct Fragments {
    float* d;
    const float* a;
    const float* b;
};

// PTX ISA, "Matrix fragments for mma.m16n8k16": where register i of a lane lies in A (16×16), B (16×8) and D (16×8).
void multiply(Thread* lanes) {
    double a[16][16], b[16][8], d[16][8];
    for (u32 lane = 0; lane < warp_lanes; ++lane) {
        const Fragments& part = *static_cast<const Fragments*>(lanes[lane].operand);
        const u32 group = lane / 4, pair = 2 * (lane % 4);
        for (u32 i = 0; i < 8; ++i) a[group + 8 * (i / 2 % 2)][pair + i % 2 + 8 * (i / 4)] = part.a[i];
        for (u32 i = 0; i < 4; ++i) b[pair + i % 2 + 8 * (i / 2)][group] = part.b[i];
        for (u32 i = 0; i < 4; ++i) d[group + 8 * (i / 2)][pair + i % 2] = part.d[i];
    }
    for (int row = 0; row < 16; ++row)
        for (int k = 0; k < 16; ++k)
            for (int column = 0; column < 8; ++column) d[row][column] += a[row][k] * b[k][column];
    for (u32 lane = 0; lane < warp_lanes; ++lane) {
        const Fragments& part = *static_cast<const Fragments*>(lanes[lane].operand);
        for (u32 i = 0; i < 4; ++i) part.d[i] = float(d[lane / 4 + 8 * (i / 2)][2 * (lane % 4) + i % 2]);
    }
}

// ---- checked memory ------------------------------------------------------------------------------------------------
// The element at `global`, of `count` elements that must lie inside the array and be aligned.
i64 element(const void* global, i64 count, const byte* array, const char* does, const char* name) {
    const i64 offset = i64(global) - i64(array);
    if (offset < 0 || offset + 2 * count > 2 * m.launch.elements)
        fail("%s %s %lld elements at element %lld of %s, which has %lld", Name(m.running->who).text, does, count,
             offset / 2, name, m.launch.elements);
    const i64 alignment = count % 8 ? 2 : vector_bytes;
    if (offset % alignment)
        fail("%s %s %lld elements at byte %lld of %s, which is not a multiple of %lld", Name(m.running->who).text, does,
             count, offset, name, alignment);
    return offset / 2;
}

void read_global(void* into, const void* global, i64 count) {
    const i64 first = element(global, count, m.x, "loads", "x");
    if (m.x == m.y)
        for (i64 i = first; i < first + count; ++i)
            if (m.writes[i] && !m.report->races++)
                std::snprintf(m.report->first_race, sizeof m.report->first_race,
                              "%s loads element %lld of x, in place, after its result was stored",
                              Name(m.running->who).text, i);
    std::memcpy(into, global, 2 * count);
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
    read_global(shared, global, bytes / 2);
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

// ---- a launch ------------------------------------------------------------------------------------------------------
void begin_cluster(i64 first_block) {
    const Launch& launch = m.launch;
    for (u32 rank = 0; rank < launch.cluster; ++rank) {
        m.blocks[rank].memory.clear(launch.shared_bytes);
        m.blocks[rank].waiting = m.blocks[rank].written_until = 0;
    }
    for (Warp& warp : m.warps) warp.waiting = 0;
    for (u32 who = 0; who < m.cluster_threads(); ++who) {
        Thread& thread = m.threads[who];
        const u32 rank = who / launch.threads;
        static_cast<Identity&>(thread) = {who % launch.threads, rank, first_block + rank, launch.blocks,
                                          m.blocks[rank].memory.base};
        thread.who = who;
        thread.clock = Clock{};
        thread.copies.clear();
        thread.groups = 0;
        thread.fiber.begin(run_kernel);
    }
    m.arrived = m.phases = 0;
    m.unfinished = m.cluster_threads();
    m.ready.clear();
    make_ready(0, m.cluster_threads());
}

// A block's shared memory is its own only while one of its threads runs.
void end_cluster() {
    for (u32 rank = 0; rank < m.launch.cluster; ++rank) {
        const Thread* const threads = &m.threads[rank * m.launch.threads];
        for (const Barrier& barrier : m.blocks[rank].memory.barriers)
            if (barrier.under_way) fail("block %lld ends with a bulk copy under way", threads[0].block);
        u32 waits = 0;
        for (u32 t = 0; t < m.launch.threads; ++t) waits = std::max(waits, threads[t].clock.waits);
        if (waits < m.blocks[rank].written_until)
            fail("block %lld may end before other blocks of its cluster have stored into its shared memory",
                 threads[0].block);
    }
    for (Warp& warp : m.warps) count_accesses(warp);
}

// Whether `body` comes to its end, which may be a jump to `done`, and nothing has failed.
template <class Body> bool ends_well(Body body) {
    if (!_setjmp(m.done)) body();
    return m.report->error[0] == 0;
}

void run_clusters() {
    for (i64 block = 0; block < m.launch.blocks; block += m.launch.cluster) {
        begin_cluster(block);
        if (!ends_well(run_next) || !ends_well(end_cluster)) return;
    }
    for (const byte writes : m.writes) {
        m.report->unwritten += writes == 0;
        m.report->rewritten += writes > 1;
    }
}

}  // namespace

// ---- primitives ----------------------------------------------------------------------------------------------------
u32 shuffle(u32 value, u32 from_lane) {
    Shuffle operand{value, from_lane};
    meet_warp(at_shuffle, &operand, [](Thread* lanes) {
        const auto of = [&](u32 lane) { return static_cast<Shuffle*>(lanes[lane].operand); };
        u32 values[warp_lanes];
        for (u32 lane = 0; lane < warp_lanes; ++lane) values[lane] = of(of(lane)->from_lane)->value;
        for (u32 lane = 0; lane < warp_lanes; ++lane) of(lane)->value = values[lane];
    });
    return operand.value;
}

void mma(float (&d)[4], const float (&a)[8], const float (&b)[4]) {
    Fragments operand{d, a, b};
    meet_warp(at_mma, &operand, multiply);
}

void block_sync() {
    step();
    Block& block = m.block();
    const u32 first = self->rank * m.launch.threads;
    m.running->waits_at = at_block_sync;
    if (++block.waiting == m.launch.threads) {
        block.waiting = 0;
        for (u32 t = first; t < first + m.launch.threads; ++t) ++m.threads[t].clock.block_syncs;
        for (u32 w = first; w < first + m.launch.threads; w += warp_lanes) count_accesses(m.warps[w / warp_lanes]);
        make_ready(first, m.launch.threads);
    }
    pause();
}

void cluster_arrive() {
    step();
    Clock& clock = m.running->clock;
    if (clock.arrivals++ != clock.waits)
        fail("%s arrives at the cluster barrier twice without waiting", Name(m.running->who).text);
    if (++m.arrived < m.cluster_threads()) return;
    m.arrived = 0;
    ++m.phases;
    for (u32 i = 0; i < m.cluster_threads(); ++i) {
        Thread& thread = m.threads[m.launch.seed == 1 ? i : m.cluster_threads() - 1 - i];
        if (thread.waits_at == at_cluster_wait) make_ready(thread);
    }
}

void cluster_wait() {
    step();
    Clock& clock = m.running->clock;
    if (clock.arrivals == clock.waits)
        fail("%s waits at the cluster barrier without having arrived", Name(m.running->who).text);
    if (m.phases == clock.waits) {
        m.running->waits_at = at_cluster_wait;
        pause();
    }
    ++clock.waits;
}

void load(Vec16& v, const void* global, i64 count) {
    step();
    if (count <= 0) return;
    read_global(&v, global, count);
    if (count == 8) m.warp().global.add(self->thread % warp_lanes, i64(global) - i64(m.x));
}

void store(void* global, const Vec16& v, i64 count) {
    step();
    if (count <= 0) return;
    const i64 first = element(global, count, m.y, "stores", "y");
    for (i64 i = first; i < first + count; ++i) m.writes[i] += m.writes[i] < 2;
    std::memcpy(global, &v, 2 * count);
    if (count == 8) m.warp().global.add(self->thread % warp_lanes, 2 * first);
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
    element(global, 8, m.x, "loads", "x");
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
    element(global, bytes / 2, m.x, "loads", "x");
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

void hadagen_run(hadagen::machine::Kernel kernel, const hadagen::machine::Launch* launch, const void* x, void* y,
                 hadagen::machine::Report* report) {
    using namespace hadagen::machine;
    m.kernel = kernel;
    m.launch = *launch;
    m.report = report;
    m.x = static_cast<const hadagen::byte*>(x);
    m.y = static_cast<hadagen::byte*>(y);
    m.writes.assign(launch->elements, 0);
    m.threads.resize(m.cluster_threads());
    m.warps.resize(m.cluster_threads() / warp_lanes);
    m.blocks.resize(launch->cluster);
    m.steps = 0;
    m.random = launch->seed;
    run_clusters();
}
