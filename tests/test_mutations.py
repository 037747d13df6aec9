"""Break a kernel, a primitive or the machine in one place, and verification notices: a wrong answer, a race, an error.

Each mutation is applied on its own, to kernels that have all kinds of statements: at one place in every run, and at
every place where it fits in the long one.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rounding import rounding_bound

from hadagen.compiler.codegen import render
from hadagen.compiler.emulator import EmulationError, HostModule, compile_host, host_texts, verify
from hadagen.plan.arch import load_arch
from hadagen.plan.knobs import Knobs
from hadagen.plan.plan import Plan
from hadagen.plan.space import build_plan
from hadagen.problem.launch import RowShape, Source
from hadagen.problem.problem import DType, Numerics, Problem, Rows

FP16, BF16 = DType.FLOAT16, DType.BFLOAT16
# All values in fp32 from the first mma on, and those between two mma in parts of bfloat16.
WIDE: dict[str, Any] = {"butterfly_carrier": "fp32", "exchange_carrier": "fp32"}
SPLIT = {"mma_carrier": "split", **WIDE}
FIRST: dict[str, Any] = {"first": "matrix", "load": "cp_async", "grid": "persistent", "stages": 3}
CHOICES: dict[str, tuple[Problem, Knobs]] = {
    "cluster exchange, bulk copies": (
        Problem.of(4096, FP16),
        Knobs(chunks=4, warps=2, cluster=2, exchange_rounds=2, load="bulk", **SPLIT),
    ),
    "bulk copies in a loop": (
        Problem.of(2048, FP16),
        Knobs(chunks=4, warps=2, load="bulk", grid="persistent", stages=2, **SPLIT),
    ),
    "two exchanges": (
        Problem.of(8192, BF16, Numerics.FAST),
        Knobs(chunks=4, warps=4, cluster=2, **WIDE),
    ),
    "far bits in lanes, mma": (
        Problem.of(8192, FP16, Numerics.FAST),
        Knobs(chunks=2, warps=8, cluster=2, far_bits="lanes", far_lanes="mma", butterfly_carrier="fp32"),
    ),
    "two far bits in lanes, mma": (
        Problem.of(4096, FP16, Numerics.FAST),
        Knobs(chunks=2, warps=8, far_bits="lanes", far_lanes="mma_two", butterfly_carrier="fp32"),
    ),
    "group by group": (
        Problem.of(4096, FP16, Numerics.FAST),
        Knobs(chunks=4, warps=4, far_bits="lanes", far_lanes="mma_two", butterfly_carrier="fp32", order="by_group"),
    ),
    "group by group in a loop": (
        Problem.of(2048, FP16, Numerics.FAST),
        Knobs(
            chunks=4,
            warps=2,
            far_bits="lanes",
            far_lanes="mma_two",
            butterfly_carrier="fp32",
            order="by_group",
            grid="persistent",
        ),
    ),
    "far bits in lanes, shuffles": (
        Problem.of(4096, BF16),
        Knobs(
            chunks=2, warps=8, far_bits="lanes", mma_carrier="tf32", shared_layout="swizzled", grid="persistent", **WIDE
        ),
    ),
    "block exchange, cp_async": (
        Problem.of(512, BF16),
        Knobs(
            chunks=2,
            warps=4,
            low_bits="mma_shuffle",
            butterfly_carrier="fp32",
            load="cp_async",
            grid="persistent",
            stages=2,
        ),
    ),
    "float32, swaps": (
        Problem.of(4096, DType.FLOAT32),
        Knobs(chunks=2, warps=8, far_bits="lanes", low_bits="shuffle", shuffles="half", **WIDE),
    ),
    "packed shuffles": (Problem.of(512, FP16, Numerics.FAST), Knobs(warps=2, far_bits="lanes")),
    "less than a vector": (
        Problem.of(4, FP16),
        Knobs(chunks=2, low_bits="shuffle", butterfly_carrier="fp32", grid="persistent"),
    ),
    "ragged bulk copies": (
        Problem.of(512, FP16, Numerics.FAST),
        Knobs(chunks=2, warps=2, load="bulk"),
    ),
    "one mma": (
        Problem.of(128, FP16, Numerics.FAST),
        Knobs(warps=2, low_bits="mma_shuffle", accumulator="packed", butterfly_carrier="fp32"),
    ),
    "pitched float32": (
        Problem.of(1024, DType.FLOAT32, rows="pitched"),
        Knobs(chunks=2, warps=4, low_bits="shuffle", **WIDE),
    ),
    "float32 in parts": (
        Problem.of(512, DType.FLOAT32),
        Knobs(chunks=2, mma_carrier="split", butterfly_carrier="fp32"),
    ),
    "float32 as tf32": (Problem.of(512, DType.FLOAT32), Knobs(chunks=2, mma_carrier="tf32", butterfly_carrier="fp32")),
    "whole rows": (Problem.of(4096, BF16), Knobs(2, 4, 2, block_bits="load", **SPLIT)),
    "whole rows, chunk by chunk": (
        Problem.of(2048, FP16, Numerics.FAST),
        Knobs(2, 1, 4, block_bits="load", low_bits="mma_shuffle", butterfly_carrier="fp32"),
    ),
    "whole rows by multicast": (
        Problem.of(4096, FP16),
        Knobs(chunks=2, warps=2, cluster=4, block_bits="load", load="multicast", **SPLIT),
    ),
    "float32 by multicast": (
        Problem.of(2048, DType.FLOAT32),
        Knobs(
            chunks=1,
            warps=2,
            cluster=4,
            block_bits="load",
            far_bits="lanes",
            low_bits="shuffle",
            load="multicast",
            trigger="load",
            **WIDE,
        ),
    ),
    "turned in the exchange": (
        Problem.of(8192, BF16),
        Knobs(
            chunks=4, warps=8, far_bits="lanes", far_lanes="mma", mma_carrier="tf32", shared_layout="swizzled", **WIDE
        ),
    ),
    "levels between blocks": (
        Problem.of(4096, BF16),
        Knobs(2, 2, 4, far_bits="lanes", mma_carrier="fp16", butterfly_carrier="fp32"),
    ),
    "levels of many warps": (
        Problem.of(8192, BF16),
        Knobs(2, 4, 4, mma_carrier="fp16", butterfly_carrier="fp32", far_bits="lanes", far_lanes="mma"),
    ),
    "matrix first": (Problem.of(3072, BF16, order=12, signed=True), Knobs(fold=2, **FIRST)),
    "matrix first, short rows": (Problem.of(320, FP16, order=20), Knobs(rows=8, **FIRST)),
    "matrix first, each warp alone": (
        Problem.of(2560, BF16, order=20, signed=True),
        Knobs(fold=1, products="alone", **FIRST),
    ),
    "matrix first, one stage": (
        Problem.of(1280, FP16, order=20, signed=True),
        Knobs(products="alone", **FIRST | {"stages": 1}),
    ),
    "pitched whole rows": (
        Problem.of(1024, FP16, rows="pitched"),
        Knobs(cluster=4, block_bits="load", mma_carrier="split"),
    ),
    "pitched, less than a vector": (
        Problem.of(4, BF16, Numerics.FAST, rows="pitched"),
        Knobs(chunks=2, low_bits="shuffle", butterfly_carrier="fp32", grid="persistent"),
    ),
}

# What to look for in a kernel, and what to put there instead.
KERNEL_MUTATIONS = {
    "no block_sync": (r"block_sync\(\);", ";"),
    "no sync between groups": (r"if \(group < \d+\) block_sync\(\);", ";"),
    "the group before": (r"(done = group) - 1", r"\1 ^ 1"),
    "no grid_dependency_sync": (r"grid_dependency_sync\(\);", ";"),
    "no cluster_arrive": (r"cluster_arrive\(\);", ";"),
    "no first cluster_arrive": (r"cluster_arrive_relaxed\(\);", ";"),
    "no barrier_expect": (r"barrier_expect\(.*\);", ";"),
    "too much expected": (r"(barrier_expect\((?:crossed|landed), )", r"\g<1>512u + "),
    "multicast to too few": (r"(bulk_multicast\(.*, )(\d)\)", r"\1\2 / 2)"),
    "a share sent twice": (r"(const u32 part = )rank", r"\1(rank / 2)"),
    "multicast to another place": (r"(bulk_multicast\(staged .*?)\+ (\d) \* part", r"\1+ \2 * (part ^ 1024)"),
    "no cluster_wait": (r"cluster_wait\(\);", ";"),
    "cluster_arrive too early": (r"(const u32 load_at = [\s\S]*)(cluster_arrive\(\);)", r"\2 \1"),
    "one sign for all blocks": (r" \^ parity\(rank & block\) << (15|31)", ""),
    "sign of that block alone": (r"parity\(rank & block\)", "parity(block)"),
    "sign of this block alone": (r"parity\(rank & block\)", "parity(rank)"),
    "a share left out": (r"for \(int block = 0;", "for (int block = 1;"),
    "a share summed twice": (r"chunks \* block \+", "chunks * (block / 2) +"),
    "a share loaded twice": (r"i / vectors \* (\d+)", r"i / vectors / 2 * \1"),
    "another block's place to store": (r"(store_at = .*)rank % ", r"\1(rank ^ 1) % "),
    "the share of another block": (r"block \* (\d+) \+ i", r"(block ^ 1) * \1 + i"),
    "shares not summed": (r"part\[at / 4\]\[at % 4\] \+= ", "(void)"),
    "too few sums": (r"apart > 0", "apart > 1"),
    "shares in another order": (r"i / vectors \* (\d+)", r"(i / vectors ^ 1) * \1"),
    "no cp_async_wait": (r"cp_async_wait<\d+>\(\);", ";"),
    "cp_async_wait too short": (r"cp_async_wait<(\d+)>", r"cp_async_wait<\1 + 1>"),
    "no commit": (r"cp_async_commit\(\);", ";"),
    "no barrier_wait": (r"(remote_)?barrier_wait\(.*\);", ";"),
    "wrong barrier_wait": (r"remote_barrier_wait", "barrier_wait"),
    # After zeros, threads have another fence before their first product.
    "no bulk_copy_fence": (r"bulk_copy_fence\(\);", ";"),
    "no barrier_init": (r"barrier_init\(.*\);", ";"),
    "no warp_sync before an arrival": (r"warp_sync\(\);(\s*if \(lane == 0\) barrier_arrive)", r"\1"),
    "no arrival": (r"if \(lane == 0\) barrier_arrive\(.*\);", ";"),
    "arrives too early": (r"(wait_for_product\(.*\);)(\s*warp_sync\(\);\s*if .*barrier_arrive.*)", r"\2 \1"),
    "no wait for a product": (r"wait_for_product\(.*\);", ";"),
    "no product": (r"multiply_boxes(_alone)?<T>\(.*\);", ";"),
    "no zeros in a box": (r"shared_store16\(staged .*zero16\(\)\);", ";"),
    "boxes askew": (r"boxes_in\(shared\)", "boxes_in(shared) + 128"),
    "boxes not swizzled": (r"box_vector \^ box_row % 8", "box_vector"),
    "swizzled the wrong way round": (r"j % 2 \? (\w+)_turned", r"j % 2 ? \1"),
    "a box not flipped": (r"flip_signs<T>\(shared_load16\(mine\), .*\)\);", "shared_load16(mine));"),
    "not folded": (r"load_folded<\d", "load_folded<0"),
    "rows of another slab": (r"\(warp < (\d) \? warp : 0\)", r"(\1 - 1 - warp)"),
    "no sign of a difference": (r"one \* sign0 \* sign1", "one * sign1"),
    "a difference the right way round": (r"-sign(0?), v\[a", r"sign\1, v[a"),
    "no guard of a copy of rows": (r", copied_from \+ at < here\)", ", true)"),
    "parity never turns": (r"parity \^= 1", "parity ^= 0"),
    "stage never turns": (r"stage = stage \+ 1 == .*;", ";"),
    "wrong place of a stage": (r"stage \* (\d+)u", r"16u + stage * \1u"),
    "wrong tile ahead": (r"start\(tile \+ \d+ \* stride", "start(tile + stride"),
    "wrong stride": (r"tile \+= stride", "tile += 2 * stride"),
    "no stride": (r"tile \+= stride", "tile += 0"),
    "bulk copy of too little": (r"2 \* count", "2 * count - 16"),
    "no low halves": (r"mma<bfloat16>\(d, h, al, bl\);", ";"),
    "no high halves": (r"mma<bfloat16>\(d, h, ah, bh\);", ";"),
    "no middle parts": (r"mma<bfloat16>\(d, h, am, bm\);", ";"),
    "high parts twice": (r" - (low|high)<bfloat16>\([ab]h\)", ""),
    "middle parts twice": (r" - (low|high)<bfloat16>\([ab]m\)", ""),
    "nothing below a tf32": (r"mma\(d, h, below_tf32.*\);", ";"),
    "nothing but what is below a tf32": (r"mma\(d, h, f.*\);", ";"),
    "values for what is below a tf32": (r"below_tf32", ""),
    "what is below a tf32 for a value": (r"(mma\(d, h, )(f\[2 \* a\])", r"\1below_tf32(\2)"),
    "wide operands swapped": (r"(\[2 \* a\])(\S* \S*\[2 \* a \+ 1\])", r"[2 * a + 1]\2"),
    "operands swapped": (r"mma<T>\(d, h, p\[a\], p\[b\]\)", "mma<T>(d, h, p[b], p[a])"),
    "results swapped": (r"= d\[0\](.*)= d\[1\]", r"= d[1]\1= d[0]"),
    "rows swapped": (r"= d\[1\](.*)= d\[2\]", r"= d[2]\1= d[1]"),
    "no change of lanes": (r"writes_to = lane \^ \(.*\), reads", "writes_to = lane, reads"),
    "read from another lane": (r"reads_from = lane \^ \(.*\);", "reads_from = lane;"),
    "halves to the same lane": (r"\(writes_to \^ \d+\)", "writes_to"),
    "not turned": (r", transpose\(([^()]*)\)", r", \1"),
    "no power": (r"hadamard16(_tf32)?\(power\d\b", r"hadamard16\1(low_half(bfloat16::one)"),
    "wrong scale": (r"\*= scale;", "*= 1.01f * scale;"),
    "no level": (r"level_of_bfloat16\(.*\);", "127u;"),
    "the level of some lanes": (r"largest_in_warp\((peak_of_bfloat16.*)\)\);", r"\1);"),
    "the level of some values": (r"i < 4 \* chunks; \+\+i\) peak", "i < 4; ++i) peak"),
    "no level told": (r"if \(lane < \d+\) remote_shared_store16\(levels.*;", ";"),
    "told as another warp's": (r"levels \+ 16 \* \(rank", "levels + 16 * (1 ^ rank"),
    "levels of another block": (r"(const u32 from = )(.*);", r"\1(\2) ^ 2;"),
    "levels of another warp": (r"(const u32 from = )(.*);", r"\1(\2) ^ 1;"),
    "the lowest level": (r"level = largest_in_warp\(other\)", "level = ~largest_in_warp(~other)"),
    "never uneven": (r"if \(largest_in_warp\(level - other\)\)", "if (false)"),
    "not brought to a level": (r"lower_float16\((.*), by\)", r"\1"),
    "level not undone": (r"undo_level\(scale, level\)", "undo_level(scale, 127u)"),
    "first factor twice": (r"high_half(\(scale_word\)\))", r"low_half\1"),
    "second factor twice": (r"low_half(\(scale_word\)\))", r"high_half\1"),
    "wrong correction": (r"high_half(\(scale_word\) \* 0x10001u)", r"low_half\1"),
    "wrong sign in fp32": (r"f\[a\] - f\[b\]", "f[b] - f[a]"),
    "wrong sign in packed": (r"sub<T>\(p\[a\], p\[b\]\)", "sub<T>(p[b], p[a])"),
    "no sum in fp32": (r"sum = f\[a\] \+ .*;", "sum = f[a];"),
    "no sum in packed": (r"sum = add<T>\(p\[a\], p\[b\]\);", "sum = p[a];"),
    "wrong partner register": (r"b = a \+ (\d+);", r"b = a ^ (\1 == 1 ? 2 : \1 / 2);"),
    "wrong lane": (r"shuffle_xor\(([^,]+), (\d+)\)", r"shuffle_xor(\1, \2 ^ 16 ^ 8)"),
    "the wrong one kept": (r"kept = up", "kept = !up"),
    "the wrong one sent": (r"shuffle_xor\(up", "shuffle_xor(!up"),
    "sent with the wrong sign": (r"up \? -f", "up ? f"),
    "wrong sign of what came": (r"\(got, kept, !up", "(got, kept, up"),
    "wrong sign of what stayed": (r"\(kept, got, up", "(kept, got, !up"),
    "wrong lane sign": (r", lane & (\d+)\)", r", !(lane & \1))"),
    "no transpose": (r"= transpose\(", "= ("),
    "wrong block": (r", (rank|c)( / \d+)?( % \d+)?, Vec16", r", (\1\2\3) ^ 1, Vec16"),
    "wrong slot to write": (r"write_at = \(", "write_at = (1 ^ "),
    "wrong slot to read": (r"read_at = \(", "read_at = (1 ^ "),
    "slots over what comes before": (r"slots = shared \+ \d+", "slots = shared"),
    "wrong half of a chunk": (r"(f\[8 \* c \+ )4(\] = as_float)", r"\g<1>5\2"),
    "wrong place to load": (r"load_at = lane \* 8", "load_at = lane * 7"),
    "wrong place to store": (r"store_at = lane \* 8", "store_at = (lane ^ 1) * 8"),
    "no guard at the end": (r"(?<!else )if \(left > offset\)", "if (true)"),
    "guard too early": (r"if \(left > offset\)", "if (left > offset + 8)"),
    "no guard of part of a vector": (r"left >= offset \+ 8", "left > offset"),
    "no guard of a copy": (r"at \+ i \* 256 < elements", "true"),
    "guard of the load too early": (r"left > i \* 256\b", "left > i * 256 + 8"),
    "wrong column": (r", column = ([^;]*);", r", column = (\1) ^ 1;"),
    "pitches swapped": (r"row \* (x|y)_pitch", r"row * (x_pitch + y_pitch - \1_pitch)"),
    "no guard of rows": (r"row \* \d+ < elements", "true"),
    "guard of rows too early": (r"(row \* \d+) <( elements)", r"\1 + 1024 <\2"),
    "no guard of columns": (r" && column < columns", ""),
    "vectors whatever the pitch": (r"[xy]_in_vectors && ", ""),
    "vectors past the columns": (r"in_vectors && left >= \d", "in_vectors && left > 0"),
}

# In which kernel it shows, what to look for in the sources of primitives, and what to put there instead.
PRIMITIVE_MUTATIONS = {
    "shuffle from the wrong lane": ("one mma", "(thread_index() ^ lanes)", "(thread_index() ^ lanes ^ 16)"),
    "butterfly_lane sign": ("one mma", "lane_bit ? -value : value", "lane_bit ? value : -value"),
    "packed butterfly_lane sign": ("packed shuffles", "lane_bit ? T::one | 0x80008000u : T::one", "T::one"),
    "operand sign": ("one mma", "parity(row & column & ~idle) << 15", "parity(row & (column ^ 1u) & ~idle) << 15"),
    "operand sign where a bit is idle": ("two far bits in lanes, mma", "row & column & ~idle", "row & column"),
    "idle bits mixed": ("two far bits in lanes, mma", "if (!((row ^ column) & idle)) ", ""),
    "operand sign of tf32": ("float32 as tf32", "parity(row & column) << 31", "parity(row & (column ^ 1u)) << 31"),
    "operand factor of tf32": ("float32 as tf32", "factor << 16 ^", "factor << 15 ^"),
    "parity": ("one mma", "__builtin_parity(bits)", "bits & 1u"),
    "operand rows": ("one mma", "8u * (i & 1)", "8u * (i >> 1)"),
    "mma operand": ("one mma", "high<T>(b0), low<T>(b1)", "low<T>(b1), high<T>(b0)"),
    "mma operand of tf32": ("float32 as tf32", "cut_to_tf32(b1), cut_to_tf32(b8)", "cut_to_tf32(b8), cut_to_tf32(b1)"),
    "cut off to bfloat16": ("float32 as tf32", "0xFFFFE000u", "0xFFFF0000u"),
    "below a longer tf32": ("float32 as tf32", "f - cut_to_tf32(f)", "f - as_float(as_word(f) & 0xFFFFF000u)"),
    "below, times 2^11": ("float32 as tf32", "return rounded * 0x1p-11f", "return rounded"),
    "transpose": ("one mma", "from + 4u", "from"),
    "power": ("float32 in parts", "scale *= as_float(254u - taken << 23);", ";"),
    "larger": ("levels between blocks", "std::fmax(values[0], values[1])", "values[0]"),
    "peak": ("levels between blocks", "return low > high ? low : high;", "return low;"),
    "largest in a warp": (
        "levels between blocks",
        "for (int lanes = 1; lanes < 32;",
        "for (int lanes = 1; lanes < 16;",
    ),
    "normalizer": ("levels between blocks", "254u - level << 7", "253u - level << 7"),
    "lower by a power": ("levels between blocks", "15u - by << 10", "14u - by << 10"),
    "lower by too much": ("levels between blocks", "1u << (24u - by) : 0u", "1u << (24u - by) : 0x3C00u"),
    "undo": ("levels between blocks", "return {1.0f, scale * as_float(level << 23)};", "return {1.0f, scale};"),
    "low half": ("less than a vector", "decode<T>(u16(pair))", "decode<T>(u16(pair >> 16))"),
    "high halves": ("float32 in parts", "as_word(low) >> 16 | (as_word(high)", "as_word(high) >> 16 | (as_word(low)"),
    "rank": ("pitched whole rows", "return machine::self->rank", "return 0"),
    "remote rank": (
        "levels between blocks",
        "remote_shared_store(shared, rank,",
        "remote_shared_store(shared, cluster_rank(),",
    ),
    "count of a load": ("less than a vector", "if (i < count) load_element", "load_element"),
    "count of a store": ("less than a vector", "if (i < count) store_element", "store_element"),
    "what is not loaded": ("pitched whole rows", "Vec16 v = zero16();", "Vec16 v{{~0u, ~0u, ~0u, ~0u}};"),
    "pitch of vectors": (
        "pitched whole rows",
        "(reinterpret_cast<u64>(rows) | pitch) % 16 == 0",
        "reinterpret_cast<u64>(rows) % 16 == 0",
    ),
    "pending": ("block exchange, cp_async", "copy_async_wait(pending)", "copy_async_wait(pending + 1)"),
    "parity of a phase": ("ragged bulk copies", "barrier_wait(barrier, parity, ", "barrier_wait(barrier, parity ^ 1, "),
    "block_sync": ("packed shuffles", "machine::block_sync();", ";"),
    "grid_dependency_sync": ("less than a vector", "machine::grid_dependency_sync();", ";"),
    "cluster_wait": ("pitched whole rows", "machine::cluster_wait();", ";"),
    "rounding": (
        "less than a vector",
        "(bits + (1ull << (dropped - 1)) - 1 + (bits >> dropped & 1)) >> dropped",
        "bits >> dropped",
    ),
    "where boxes begin": ("matrix first", "- (reinterpret_cast<u64>(shared) & 1023u)", ""),
    "arrival": ("matrix first", "machine::barrier_arrive(barrier);", ";"),
    "sign of a folded operand": ("matrix first", "parity(r & c & inner) << 15", "0u"),
    "sign of the next folded operand": ("matrix first", "parity(r & (c + 1u) & inner)", "parity(r & c & inner)"),
    "place of a folded operand": ("matrix first", "j % 16u / 8u * 4u", "j % 16u / 8u * 2u"),
    "rows as columns": (
        "matrix first, each warp alone",
        "if (of(0).transposed) std::swap(row, column);",
        "",
    ),
    "box read as if not swizzled": (
        "matrix first, each warp alone",
        "(vector % 8 + lane / 16) ^ lane % 8",
        "(vector % 8 + lane / 16)",
    ),
    "columns of a box swapped": ("matrix first, each warp alone", "x[2 * i], x[2 * i + 1]", "x[i], x[i + 2]"),
    "machine, rows of a box": ("matrix first, short rows", "within / 8 ^ k % 8", "within / 8"),
    "machine, boxes side by side": ("matrix first, short rows", "+ column / box_columns;", ";"),
    "machine, rows of A": ("one mma", "a[group + 8 * (i / each % 2)]", "a[group ^ 8 * (i / each / 2)]"),
    "machine, columns of A": ("one mma", "each * t + i % each + depth / 2 * (i / each / 2)", "each * t + i % each"),
    "machine, shuffle": ("one mma", "of(lane)->value = values[lane]", "of(lane)->value = values[lane & 15]"),
}


@dataclass(frozen=True)
class Subject:
    """A kernel, perhaps a broken one."""

    name: str
    plan: Plan
    source: Source

    def is_caught(self, module: HostModule) -> bool:
        """Whether some verification, in any order, in place or not, finds the kernel wrong."""
        return any(
            self._is_caught(module, order_seed=seed, in_place=in_place, shape=shape)
            for seed, in_place, shape in zip((2, 0, 1), (True, False, True), self._shapes(), strict=True)
        )

    def _shapes(self) -> tuple[RowShape | None, ...]:
        """Rows of whole vectors; some that end inside of one; and some that begin anywhere."""
        n = self.plan.problem.n
        ragged = (n + 1) // 2 + 1
        if self.plan.problem.io.rows is Rows.CONTIGUOUS:
            return None, None, None
        return None, RowShape(ragged, n, n + 8), RowShape(ragged, n + 2, n + 2)

    def _is_caught(self, module: HostModule, **arrangement: Any) -> bool:
        plan = self.plan
        try:
            errors = verify(plan.problem, self.source, module=module, **arrangement)
        except EmulationError:
            return True
        return not max(errors.values()) <= rounding_bound(plan.problem)


@pytest.fixture(scope="module")
def cache_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nobody else wants what is built here."""
    return tmp_path_factory.mktemp("host")


@pytest.fixture(scope="module")
def sound() -> list[Subject]:
    arch = load_arch("sm90")
    plans = {name: build_plan(problem, knobs, arch) for name, (problem, knobs) in CHOICES.items()}
    return [Subject(name, plan, render(plan)) for name, plan in plans.items()]


def mutants(subject: Subject, mutation: str) -> Iterator[Subject]:
    """One for each place where the mutation fits."""
    pattern, replacement = KERNEL_MUTATIONS[mutation]
    text = subject.source.text
    for number, match in enumerate(re.finditer(pattern, text)):
        broken = text[: match.start()] + match.expand(replacement) + text[match.end() :]
        entry = f"{subject.source.entry}_{re.sub('[^a-z]', '_', mutation)}_{number}"
        line = text.count("\n", 0, match.start()) + 1
        source = Source(entry, broken.replace(subject.source.entry, entry), subject.plan.launch)
        yield Subject(f"{mutation}, line {line} of {subject.name}", subject.plan, source)


@pytest.fixture(scope="module")
def broken(sound: list[Subject]) -> dict[str, list[Subject]]:
    """Of each mutation the kernel with the shortest rows first, which is the fastest to run."""
    by_length = sorted(sound, key=lambda subject: subject.plan.problem.n)
    return {name: [mutant for subject in by_length for mutant in mutants(subject, name)] for name in KERNEL_MUTATIONS}


@pytest.fixture(scope="module")
def sample(sound: list[Subject], broken: dict[str, list[Subject]], cache_directory: Path) -> HostModule:
    """The sound kernels, and each mutation at one place."""
    subjects = [*sound, *(subject for some in broken.values() for subject in some[:1])]
    return compile_host([subject.source for subject in subjects], cache_directory=cache_directory)


@pytest.fixture(scope="module")
def rest(broken: dict[str, list[Subject]], cache_directory: Path) -> HostModule:
    """Each mutation at all other places."""
    subjects = [subject for some in broken.values() for subject in some[1:]]
    return compile_host([subject.source for subject in subjects], cache_directory=cache_directory)


def test_sound_kernels_are_not_caught(sound: list[Subject], sample: HostModule) -> None:
    assert [subject.name for subject in sound if subject.is_caught(sample)] == []


@pytest.mark.parametrize("mutation", KERNEL_MUTATIONS)
def test_a_broken_kernel_is_caught(mutation: str, broken: dict[str, list[Subject]], sample: HostModule) -> None:
    assert broken[mutation], "fits nowhere"
    assert [subject.name for subject in broken[mutation][:1] if not subject.is_caught(sample)] == []


@pytest.mark.parametrize("mutation", KERNEL_MUTATIONS)
def test_a_kernel_broken_anywhere_is_caught(mutation: str, broken: dict[str, list[Subject]], rest: HostModule) -> None:
    assert [subject.name for subject in broken[mutation][1:] if not subject.is_caught(rest)] == []


@pytest.mark.parametrize("mutation", PRIMITIVE_MUTATIONS)
def test_a_broken_primitive_is_caught(mutation: str, sound: list[Subject], cache_directory: Path) -> None:
    name, old, new = PRIMITIVE_MUTATIONS[mutation]
    texts = {file: text.replace(old, new) for file, text in host_texts().items()}
    assert texts != host_texts(), "fits nowhere"
    (subject,) = (subject for subject in sound if subject.name == name)
    assert subject.is_caught(compile_host([subject.source], texts=texts, cache_directory=cache_directory))
