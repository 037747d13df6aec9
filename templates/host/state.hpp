// The state of the machine, shared by machine.cpp (threads) and access.cpp (memory).
#pragma once

#include <csetjmp>
#include <vector>

#include "fiber.hpp"
#include "memory.hpp"

namespace hadagen::machine {

// Where a thread waits; compared as pointers.
inline constexpr char at_shuffle[] = "shuffle", at_mma[] = "mma", at_rows[] = "ldmatrix", at_warp_sync[] = "warp_sync", at_block_sync[] = "block_sync",
                      at_cluster_wait[] = "cluster_wait", at_barrier_wait[] = "barrier_wait", at_product[] = "wgmma",
                      at_product_end[] = "wait_for_product", ended[] = "ended";

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
    const char* plan_step;  // its number and sentence; "" before the first
    void* operand;         // of a warp's collective, on this thread's stack
    std::vector<Product> products;  // that it has not waited for
    std::vector<Stamp> fences;  // when it called each bulk_copy_fence
    std::vector<AsyncCopy> copies;
    u32 groups;  // of copies committed
    bool synced;  // with the kernels before this one
    bool touched_shared;
};

struct Warp {
    u32 waiting = 0;
    const char* meets_at = nullptr;
    WarpAccesses shared, global;
    std::vector<const byte*> multiplied;  // the boxes of each of its products
};

struct Block {
    SharedMemory memory;
    u32 waiting = 0;
};

// Which blocks have loaded an element that lies in place, where results are stored too.
struct Loaded {
    static constexpr i64 by_nobody = -1, by_several = -2;
    i64 by = by_nobody;  // or the number of the block
    u32 arrivals = 0;    // at the cluster barrier, of the last thread to load it
};

// x or y. `elements`: from its first to its last, with the gaps between rows.
struct Array {
    const byte* at;  // null for y where results are codes
    i64 elements, pitch;
    const char* name;
};

struct Machine {
    Kernel kernel;
    Launch launch;
    Report* report;
    Array x, y;
    std::vector<byte> writes;    // of each element of y, up to 2; in place, of each element of x too
    std::vector<std::vector<byte>> output_writes;  // of each byte of each output
    std::vector<Loaded> loaded;  // in place, of each element of x and y, which may differ in number

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

    bool in_place() const { return x.at == y.at; }
    u32 cluster_threads() const { return launch.threads * launch.cluster; }
    Block& block() { return blocks[running->rank]; }
    Warp& warp() { return warps[running->who / warp_lanes]; }
};
extern Machine m;

// ---- threads -------------------------------------------------------------------------------------------------------
// Lets others run until the running thread is made ready again.
void pause();
void make_ready(Thread& thread);
// A collective of a warp. The last lane to come carries out `together` for all of them.
void meet_warp(const char* where, void* operand, void (*together)(Thread* lanes));

// ---- what went wrong -----------------------------------------------------------------------------------------------
// Ends the launch. Every thread is left where it is.
[[noreturn, gnu::format(printf, 1, 2)]] void fail(const char* format, ...);

// "thread 5 of block 0", for messages.
struct Name {
    char text[48];
    explicit Name(u32 who);
};

// Counts a call of a primitive.
inline void step() {
    if (++m.steps > m.launch.steps) fail("the kernel does not end: %lld calls of primitives so far", m.steps);
}

}  // namespace hadagen::machine
