// What the host primitives stand on: a machine that runs every thread of a cluster as a fiber.
// A thread runs until it reaches a collective that others have yet to reach; then another one runs. Memory is checked
// at every access. What a kernel does wrong ends the launch with a sentence (`Report::error`) or is counted.
#pragma once

#include "words.cuh"

namespace hadagen {

namespace machine {

struct Identity {
    u32 thread;     // in the block
    u32 rank;       // of the block in its cluster
    i64 block;      // in the grid
    i64 blocks;     // of the grid
    byte* shared;   // the block's dynamic shared memory
};
extern const Identity* self;  // the thread that runs

// The running thread comes to a step of the plan. `step`: its number and sentence, for messages.
void begin_step(const char* step);

// Collectives of a warp.
u32 shuffle(u32 value, u32 from_lane);
// d += a · b, each lane with its fragments of mma.m16n8k16 or m16n8k8, decoded: the sums are exact to fp64 and rounded
// once to fp32.
void mma(float (&d)[4], const float (&a)[8], const float (&b)[4]);
void mma(float (&d)[4], const float (&a)[4], const float (&b)[2]);
// Each lane gives a row of an 8×8 matrix of 16-bit elements, lanes 8i … 8i + 7 those of matrix i. It gets elements
// 2t and 2t + 1 of row lane / 4 of each matrix, t = lane % 4; of each transposed matrix where that is asked.
void spread_rows(const Vec16& row, u32 (&words)[4], bool transposed);

// Collectives of the warp, the block and the cluster that order accesses to memory.
void warp_sync();
void block_sync();
void cluster_arrive();
void cluster_arrive_relaxed();  // before the thread touches shared memory
void cluster_wait();

// Global memory, which a kernel that starts early touches only after the sync. `bytes`: of one element, or a whole vector.
void grid_dependency_sync();
void trigger_dependents();
void load(void* into, const void* global, i64 bytes);
void store(void* global, const void* from, i64 bytes);

// Shared memory. Loads take 16 bytes, stores a whole number of words.
Vec16 shared_load(const byte* shared);
void shared_store(byte* shared, const void* from, u32 bytes);

// Asynchronous copies. The bytes read as NaN until the thread has waited. `global`: null for zeros.
void copy_async(byte* shared, const void* global);
void copy_async_commit();
void copy_async_wait(u32 pending);
void barrier_init(const u64* barrier);
void barrier_init(const u64* barrier, u32 arrivals);  // for so many arrivals a phase
void barrier_arrive(const u64* barrier);
void barrier_expect(const u64* barrier, u32 bytes);
void bulk_copy_fence();
void bulk_prefetch(const void* global, u32 bytes);
void bulk_copy(byte* shared, const void* global, u32 bytes, const u64* barrier);
void bulk_multicast(byte* shared, const void* global, u32 bytes, const u64* barrier, u32 blocks);
void remote_shared_store(byte* shared, u32 rank, const Vec16& v, const u64* barrier);
void barrier_wait(const u64* barrier, u32 parity, bool remote);

// A product of a warp's rows with boxes in shared memory, as the primitives say. The thread's operand and its sums stay where
// they are until it has waited: until then the sums are NaN. `decode`: bits → value of the type of both operands.
struct Product {
    float* sums;
    u32 count;
    const u32* words;  // four for each step and piece
    u32 steps;
    u32 pieces;  // whose sum is the left operand
    u32 planes;  // whose sum is the right operand
    const byte* boxes;
    float (*decode)(u16);
};
void begin_product(const Product& product);
void end_product(const float* sums);

// ---- for emulator.py, which mirrors these structures -----------------------------------------------------------
// What a kernel may read besides x.
struct Operand {
    const byte* at;
    i64 bytes;
};

// What a kernel writes besides y: some bytes, of which so many must be written. None may be twice.
struct Output {
    byte* at;
    i64 bytes;
    i64 least;
};

struct Launch {
    i64 blocks;
    i64 elements;
    // How x and y lie in memory: rows of `columns` elements, so many elements apart. Nothing in between may be touched.
    i64 rows;
    i64 columns;
    i64 x_pitch;
    i64 y_pitch;
    i64 x_elements;  // from the first to the end of x
    i64 steps;  // calls of primitives after which a kernel is taken to loop forever
    u64 seed;   // order in which threads run
    const u64* arguments;  // of the kernel
    const Operand* operands;
    u64 operand_count;
    const Output* outputs;
    u64 output_count;
    u32 threads;
    u32 cluster;
    u32 shared_bytes;
    u32 element_bytes;
    u32 starts_early;  // whether the kernel does
};

struct Report {
    i64 races;                // accesses with no barrier between them and another thread's access to the same bytes
    i64 uninitialized_reads;  // of shared memory that nobody has written
    i64 unwritten;            // elements of the output
    i64 rewritten;            // elements of the output written more than once
    i64 wavefronts;           // of shared memory accesses
    i64 bank_conflicts;       // those of the wavefronts that no conflict-free access would need
    i64 sectors;              // of 32 bytes, touched by global accesses
    i64 excess_sectors;       // those that no coalesced access would touch
    i64 prefetched_bytes;     // that L2 was asked for
    char first_race[256];
    char first_uninitialized_read[256];
    char error[768];  // empty where the kernel ran to its end
};

// Calls a kernel with its arguments, of eight bytes each; `compile_host` writes one beside every kernel.
using Kernel = void (*)(const u64* arguments);

}  // namespace machine
}  // namespace hadagen

// Runs `kernel` on `elements` elements. `report` comes zeroed.
extern "C" __attribute__((visibility("default"))) void hadagen_run(hadagen::machine::Kernel kernel,
                                                                   const hadagen::machine::Launch* launch,
                                                                   const void* x, void* y,
                                                                   hadagen::machine::Report* report);
