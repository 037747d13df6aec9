// What is known of memory while a kernel runs: who touched each word of shared memory and when, which elements of
// global memory were written, and what the accesses of a warp cost.
#pragma once

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <vector>

#include "machine.hpp"

namespace hadagen::machine {

constexpr u32 vector_bytes = 16;
constexpr u32 word_bytes = 4;  // the least that kernels store to shared memory
constexpr int warp_lanes = 32;
constexpr int max_barriers = 16; // mbarriers of one block
constexpr int max_warps = 32;    // of one block
constexpr int product_warps = 4;  // that carry out a product together

// ---- races ---------------------------------------------------------------------------------------------------------
// What a thread knows of its block from mbarriers that it has waited for, and from threads that had arrived there.
struct Known {
    std::array<u32, max_barriers> landed{};  // phases of each mbarrier that have ended
    std::array<u32, max_warps> warp_syncs{};  // of a thread of each warp, when it arrived

    void add(const Known& other) {
        for (u32 b = 0; b < max_barriers; ++b) landed[b] = std::max(landed[b], other.landed[b]);
        for (u32 w = 0; w < max_warps; ++w) warp_syncs[w] = std::max(warp_syncs[w], other.warp_syncs[w]);
    }
    bool operator==(const Known& other) const { return landed == other.landed && warp_syncs == other.warp_syncs; }
};

// How far a thread has come, in numbers that other threads' accesses are compared with.
struct Clock {
    u32 warp = 0;  // the number of its warp in the block
    u32 warp_syncs = 0, block_syncs = 0;
    u32 arrivals = 0, waits = 0;           // at the cluster barrier
    Known known{};

    bool knows_as_much_as(const Clock& other) const {
        return known == other.known && block_syncs == other.block_syncs && waits == other.waits;
    }
};

// Who made an access, and when.
struct Stamp {
    enum By : byte { nobody, thread, several_threads, copy_under_way, landed, product_under_way } by = nobody;
    u32 who = 0;          // the thread, numbered in its cluster; of what has landed, the first that waited for it
    u32 rank = 0;         // the block of the thread
    u32 warps = 0;        // a bit for the warp of each thread, by its number in the block
    u32 warp_syncs = 0;   // of the thread's clock; of several threads, the latest
    u32 block_syncs = 0;
    u32 arrivals = 0;
    u32 fences = 0;  // bulk copies and products come after
    u32 barrier = 0;  // of what has landed
    u32 phase = 0;    // whose end shows that it has landed
    bool of_products = false;  // whether products made it, which no bulk_copy_fence need follow
};

// Whether an access is over, and seen to be, when thread `who` of block `rank` is at `now`. A thread that has passed
// the warp_sync, block_sync or cluster_wait that another has reached after its access comes after that access. So does one
// that has waited for an mbarrier where a thread has arrived after it met the other in a warp_sync. (Barriers of two kinds
// in a chain are not followed where a thread arrives at one kind, touches memory, and then waits for the other.)
inline bool happened_before(const Stamp& access, u32 who, u32 rank, const Clock& now) {
    if (access.by == Stamp::nobody) return true;
    if (access.by == Stamp::copy_under_way) return false;
    const bool same_warp = access.by == Stamp::thread && access.who / warp_lanes == who / warp_lanes;
    if (same_warp && (access.who == who || now.warp_syncs > access.warp_syncs)) return true;
    const bool same_block = access.rank == rank;
    if (same_block && access.warps) {
        bool all = true;
        for (u32 warp = 0; warp < max_warps; ++warp)
            if (access.warps >> warp & 1)
                all = all && (warp == now.warp ? now.warp_syncs : now.known.warp_syncs[warp]) > access.warp_syncs;
        if (all) return true;
    }
    if (access.by == Stamp::landed && same_block && now.known.landed[access.barrier] >= access.phase) return true;
    return (same_block && now.block_syncs > access.block_syncs) || now.waits > access.arrivals;
}

struct Cell {
    Stamp write, read;  // the latest; `read` only since that write
};

// ---- the shared memory of one block --------------------------------------------------------------------------------
// What lands when a phase of a barrier ends: bytes of global memory or, where `global` is null, a vector. Bytes that
// several blocks get are read once, when they land in the first of these, and shared.
struct Arrival {
    byte* shared;
    const void* global;
    u32 bytes;
    Vec16 vector{};
    std::shared_ptr<std::vector<byte>> shared_bytes{};
};

struct Barrier {
    const u64* address;
    u32 phases = 0;  // that have ended
    Stamp ended{};   // who was the first to see the latest end
    u32 expected = 0, came = 0;  // bytes of this phase
    bool stored = false;         // whether blocks stored what came with the latest end
    u32 needed = 0, arrived_so_far = 0;  // threads that end a phase, and that have arrived in this one; 0 where bytes end it
    Known arrived{}, known{};  // of threads that have arrived so far, and of those of the phases that have ended
    std::vector<Arrival> arrivals{};
};

struct Span {
    u32 offset, bytes;
};

struct SharedMemory {
    std::vector<Vec16> storage;
    std::vector<Cell> cells;  // one for each word
    std::vector<Barrier> barriers;
    std::vector<Span> multiplied;  // what products under way read
    byte* base = nullptr;

    // It begins at a multiple of 128 bytes, as kernels declare it, and not of 256.
    void clear(u32 bytes) {
        constexpr u32 alignment = 128;
        storage.resize((bytes + 3 * alignment) / vector_bytes + 1);
        const u64 address = reinterpret_cast<u64>(storage.data());
        base = reinterpret_cast<byte*>(storage.data()) + (2 * alignment - address % (2 * alignment)) + alignment;
        poison(base, bytes);
        cells.assign((bytes + word_bytes - 1) / word_bytes, Cell{});
        multiplied.clear();
        barriers.clear();
        barriers.reserve(max_barriers);  // references to them stay good
    }
    // All ones is a NaN in every format.
    static void poison(byte* at, u32 bytes) { std::memset(at, 0xFF, bytes); }
};

// ---- the cost of a warp's accesses ---------------------------------------------------------------------------------
// Lanes do not run in lockstep here. The accesses of one instruction are told by counting: a lane's s-th access since
// its warp last met at a collective belongs with the other lanes' s-th.
class WarpAccesses {
   public:
    static constexpr i64 none = -1;
    struct Row {
        std::array<i64, warp_lanes> addresses;  // of the bytes of each lane
        u32 bytes;                              // that a lane accesses
    };

    void add(u32 lane, i64 address, u32 bytes = vector_bytes) {
        const u32 row = counts_[lane]++;
        if (row == rows_.size()) {
            rows_.push_back({{}, bytes});
            rows_.back().addresses.fill(none);
        }
        rows_[row].addresses[lane] = address;
    }

    template <class Count> void flush(Count count) {
        for (const Row& row : rows_) count(row);
        rows_.clear();
        counts_.fill(0);
    }

   private:
    std::vector<Row> rows_;
    std::array<u32, warp_lanes> counts_{};
};

// Accesses to shared memory are served 128 bytes at a time: 16-byte ones of eight lanes, smaller ones of more. Each group
// of banks as wide as an access gives one address a wavefront.
inline void count_wavefronts(const WarpAccesses::Row& row, Report& report) {
    const int together = 128 / row.bytes;
    for (int first = 0; first < warp_lanes; first += together) {
        std::array<i64, warp_lanes> seen;
        std::array<int, warp_lanes> in_group{};
        int distinct = 0, wavefronts = 0;
        for (int lane = first; lane < first + together; ++lane) {
            const i64 address = row.addresses[lane];
            if (address == WarpAccesses::none) continue;
            const auto end = seen.begin() + distinct;
            if (std::find(seen.begin(), end, address) != end) continue;
            seen[distinct++] = address;
            wavefronts = std::max(wavefronts, ++in_group[address / row.bytes % together]);
        }
        report.wavefronts += wavefronts;
        report.bank_conflicts += std::max(0, wavefronts - 1);
    }
}

// Global memory is moved in sectors of 32 bytes.
inline void count_sectors(WarpAccesses::Row row, Report& report) {
    constexpr int sector_bytes = 32;
    std::sort(row.addresses.begin(), row.addresses.end());
    i64 vectors = 0, sectors = 0, last = WarpAccesses::none;
    for (const i64 address : row.addresses) {
        if (address == WarpAccesses::none || address == last) continue;
        ++vectors;
        sectors += last == WarpAccesses::none || address / sector_bytes != last / sector_bytes;
        last = address;
    }
    report.sectors += sectors;
    report.excess_sectors += sectors - (vectors * vector_bytes + sector_bytes - 1) / sector_bytes;
}

}  // namespace hadagen::machine
