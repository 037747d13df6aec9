#include <algorithm>
#include <cstdarg>
#include <cstdio>

#include "state.hpp"

namespace hadagen::machine {

const Identity* self;
Machine m;

// ---- what went wrong -----------------------------------------------------------------------------------------------
void fail(const char* format, ...) {
    va_list values;
    va_start(values, format);
    std::vsnprintf(m.report->error, sizeof m.report->error, format, values);
    va_end(values);
    _longjmp(m.done, 1);
}

Name::Name(u32 who) {
    const Thread& thread = m.threads[who];
    std::snprintf(text, sizeof text, "thread %u of block %lld", thread.thread, thread.block);
}

namespace {

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

}  // namespace

void pause() {
    if (!_setjmp(m.running->fiber.place)) run_next();
}

void make_ready(Thread& thread) {
    thread.waits_at = nullptr;
    m.ready.push_back(&thread);
}

namespace {

// Seed 0 runs threads in order, each as far as it comes; seed 1 the other way round; any other at random.
void make_ready(u32 first, u32 count) {
    for (u32 i = 0; i < count; ++i) make_ready(m.threads[m.launch.seed == 1 ? first + i : first + count - 1 - i]);
}

void run_kernel() {
    m.kernel(m.launch.arguments);
    if (!m.running->products.empty()) fail("%s ends before its product", Name(m.running->who).text);
    m.running->waits_at = ended;
    --m.unfinished;
    run_next();
}

// ---- collectives ---------------------------------------------------------------------------------------------------
void count_accesses(Warp& warp) {
    warp.shared.flush([](const WarpAccesses::Row& row) { count_wavefronts(row, *m.report); });
    warp.global.flush([](const WarpAccesses::Row& row) { count_sectors(row, *m.report); });
}

struct Shuffle {
    u32 value, from_lane;
};

struct Fragments {
    float* d;
    const float* a;
    const float* b;
};

// PTX ISA, "Matrix fragments for mma.m16n8k16" with 16-bit elements, two to a register, and "for mma.m16n8k8" with
// tf32, one to a register: where element i of a lane lies in A (16×depth), B (depth×8) and D (16×8).
template <u32 depth> void multiply(Thread* lanes) {
    constexpr u32 each = depth / 8;  // elements to a register
    double a[16][depth], b[depth][8], d[16][8];
    for (u32 lane = 0; lane < warp_lanes; ++lane) {
        const Fragments& part = *static_cast<const Fragments*>(lanes[lane].operand);
        const u32 group = lane / 4, t = lane % 4;
        for (u32 i = 0; i < 4 * each; ++i)
            a[group + 8 * (i / each % 2)][each * t + i % each + depth / 2 * (i / each / 2)] = part.a[i];
        for (u32 i = 0; i < 2 * each; ++i) b[each * t + i % each + depth / 2 * (i / each)][group] = part.b[i];
        for (u32 i = 0; i < 4; ++i) d[group + 8 * (i / 2)][2 * t + i % 2] = part.d[i];
    }
    for (int row = 0; row < 16; ++row)
        for (u32 k = 0; k < depth; ++k)
            for (int column = 0; column < 8; ++column) d[row][column] += a[row][k] * b[k][column];
    for (u32 lane = 0; lane < warp_lanes; ++lane) {
        const Fragments& part = *static_cast<const Fragments*>(lanes[lane].operand);
        for (u32 i = 0; i < 4; ++i) part.d[i] = float(d[lane / 4 + 8 * (i / 2)][2 * (lane % 4) + i % 2]);
    }
}

// ---- a launch ------------------------------------------------------------------------------------------------------
void begin_cluster(i64 first_block) {
    const Launch& launch = m.launch;
    for (u32 rank = 0; rank < launch.cluster; ++rank) {
        m.blocks[rank].memory.clear(launch.shared_bytes);
        m.blocks[rank].waiting = 0;
    }
    for (Warp& warp : m.warps) warp = Warp{};
    for (u32 who = 0; who < m.cluster_threads(); ++who) {
        Thread& thread = m.threads[who];
        const u32 rank = who / launch.threads;
        static_cast<Identity&>(thread) = {who % launch.threads, rank, first_block + rank, launch.blocks,
                                          m.blocks[rank].memory.base};
        thread.who = who;
        thread.clock = Clock{};
        thread.clock.warp = thread.thread / warp_lanes;
        thread.plan_step = "";
        thread.copies.clear();
        thread.products.clear();
        thread.fences.clear();
        thread.groups = 0;
        thread.synced = !launch.starts_early;
        thread.touched_shared = false;
        thread.fiber.begin(run_kernel);
    }
    m.arrived = m.phases = 0;
    m.unfinished = m.cluster_threads();
    m.ready.clear();
    make_ready(0, m.cluster_threads());
}

// A block's shared memory is its own only while one of its threads runs.
void end_cluster() {
    for (u32 rank = 0; rank < m.launch.cluster; ++rank)
        for (const Barrier& barrier : m.blocks[rank].memory.barriers)
            if (barrier.came)
                fail("block %lld ends while %u bytes are on their way to it",
                     m.threads[rank * m.launch.threads].block, barrier.came);
    for (u32 warp = 1; warp < m.warps.size(); ++warp)
        if (warp % product_warps && m.warps[warp].multiplied.size() != m.warps[warp - 1].multiplied.size())
            fail("%s has not carried out as many products as the warp before it", Name(warp * warp_lanes).text);
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
    for (u64 i = 0; i < m.launch.output_count; ++i) {
        const std::vector<byte>& writes = m.output_writes[i];
        const i64 written = std::count_if(writes.begin(), writes.end(), [](byte count) { return count > 0; });
        m.report->unwritten += std::max<i64>(0, m.launch.outputs[i].least - written);
        m.report->rewritten += std::count(writes.begin(), writes.end(), byte(2));
    }
    for (i64 i = 0; i < m.y.elements; ++i) {
        m.report->unwritten += m.writes[i] == 0 && i % m.y.pitch < m.launch.columns;
        m.report->rewritten += m.writes[i] > 1;
    }
}

}  // namespace

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

void begin_step(const char* step) { m.running->plan_step = step; }

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

void spread_rows(const Vec16& row, u32 (&words)[4], bool transposed) {
    struct Rows {
        const Vec16& row;
        u32 (&words)[4];
        bool transposed;
    } operand{row, words, transposed};
    meet_warp(at_rows, &operand, [](Thread* lanes) {
        const auto of = [&](u32 lane) -> Rows& { return *static_cast<Rows*>(lanes[lane].operand); };
        const auto element = [&](u32 first, u32 row, u32 column) {
            if (of(0).transposed) std::swap(row, column);
            return of(first + row).row.word[column / 2] >> 16 * (column % 2) & 0xFFFFu;
        };
        for (u32 lane = 0; lane < warp_lanes; ++lane)
            for (u32 i = 0; i < 4; ++i) {
                const u32 group = lane / 4, first = 8 * i, at = lane % 4 * 2;
                of(lane).words[i] = element(first, group, at) | element(first, group, at + 1) << 16;
            }
    });
}

void mma(float (&d)[4], const float (&a)[8], const float (&b)[4]) {
    Fragments operand{d, a, b};
    meet_warp(at_mma, &operand, multiply<16>);
}

void mma(float (&d)[4], const float (&a)[4], const float (&b)[2]) {
    Fragments operand{d, a, b};
    meet_warp(at_mma, &operand, multiply<8>);
}

void warp_sync() {
    meet_warp(at_warp_sync, nullptr, [](Thread* lanes) {
        Known all;
        for (u32 lane = 0; lane < warp_lanes; ++lane) all.add(lanes[lane].clock.known);
        for (u32 lane = 0; lane < warp_lanes; ++lane) {
            lanes[lane].clock.known = all;
            ++lanes[lane].clock.warp_syncs;
        }
    });
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

void cluster_arrive_relaxed() {
    if (m.running->touched_shared)
        fail("%s arrives at the cluster barrier, relaxed, after it has touched shared memory",
             Name(m.running->who).text);
    cluster_arrive();
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

}  // namespace hadagen::machine

void hadagen_run(hadagen::machine::Kernel kernel, const hadagen::machine::Launch* launch, const void* x, void* y,
                 hadagen::machine::Report* report) {
    using namespace hadagen::machine;
    m.kernel = kernel;
    m.launch = *launch;
    m.report = report;
    const hadagen::i64 of_y = y && launch->rows ? (launch->rows - 1) * launch->y_pitch + launch->columns : 0;
    m.x = {static_cast<const hadagen::byte*>(x), launch->x_elements, launch->x_pitch, "x"};
    m.y = {static_cast<const hadagen::byte*>(y), of_y, launch->y_pitch, "y"};
    const hadagen::i64 of_both = m.in_place() ? std::max(m.x.elements, m.y.elements) : 0;
    m.writes.assign(std::max(of_y, of_both), 0);
    m.output_writes.clear();
    for (hadagen::u64 i = 0; i < launch->output_count; ++i) m.output_writes.emplace_back(launch->outputs[i].bytes, 0);
    m.loaded.assign(of_both, Loaded{});
    m.threads.resize(m.cluster_threads());
    m.warps.resize(m.cluster_threads() / warp_lanes);
    m.blocks.resize(launch->cluster);
    m.steps = 0;
    m.random = launch->seed;
    run_clusters();
}
