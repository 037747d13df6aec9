"""A few short kernels that have, together, every structure of a kernel, for any arch."""

from hadagen.plan.arch import Arch
from hadagen.plan.knobs import KNOB_VALUES
from hadagen.plan.plan import Plan
from hadagen.plan.space import Space, build_plan
from hadagen.problem.problem import DType, Numerics, Problem, Rows

F16, BF16, F32 = DType
FAST = Numerics.FAST
WIDE = {"butterfly_carrier": "fp32", "exchange_carrier": "fp32"}
FAR = {"chunks": 2, "warps": 8, "far_bits": "lanes", "far_lanes": "mma"}
LOOPS = {"grid": "persistent", "stages": 2}
FIRST = {"first": "matrix", "load": "cp_async", "grid": "persistent", "stages": 3}
WHOLE = {"chunks": 2, "cluster": 2, "block_bits": "load", **WIDE}
# Problem, and the knobs that are wanted for it. Where an arch lacks what is wanted, the nearest is taken.
SPREAD = [
    (Problem.of(2, F32), {}),
    (Problem.of(16, F16, FAST), {"low_bits": "mma_shuffle", "accumulator": "packed", **LOOPS}),
    (Problem.of(8, BF16, rows=Rows.PITCHED), {}),
    (Problem.of(256, F16, FAST), {"accumulator": "packed", "load": "cp_async", **LOOPS}),
    (Problem.of(256, BF16, FAST), {"load": "bulk", **LOOPS}),
    (Problem.of(256, BF16), {"mma_carrier": "split", "ahead": 8}),
    (Problem.of(256, F32), {"mma_carrier": "tf32"}),
    (Problem.of(256, F32, rows=Rows.PITCHED), {"mma_carrier": "split"}),
    (Problem.of(512, F16, FAST), {"chunks": 2}),
    (Problem.of(512, BF16, FAST), {"chunks": 2, "warps": 2, "mma_carrier": "tf32"}),
    (Problem.of(1024, BF16), {"chunks": 2, "cluster": 2, "mma_carrier": "fp16"}),
    (Problem.of(4096, F16, FAST), {**FAR, "accumulator": "packed"}),
    (Problem.of(4096, BF16), {**FAR, **WIDE, "mma_carrier": "tf32"}),
    (Problem.of(4096, F16, FAST), {**FAR, **WIDE}),
    (Problem.of(1024, F16), {"chunks": 2, "cluster": 2, **WIDE, "low_bits": "mma_shuffle", "exchange_rounds": 2}),
    (Problem.of(1024, F16), {**WHOLE, "mma_carrier": "split", "load": "multicast", "trigger": "load"}),
    (Problem.of(1024, BF16, FAST), {**WHOLE, "low_bits": "mma_shuffle"}),
    (Problem.of(1024, F32), {**WHOLE, "low_bits": "shuffle", "load": "multicast"}),
    (Problem.of(1024, F32), {"chunks": 2, "warps": 2, "far_bits": "lanes", "low_bits": "shuffle", "shuffles": "half"}),
    (Problem.of(2048, BF16), {"chunks": 4, "warps": 2, **WIDE, "low_bits": "shuffle", "order": "by_group"}),
    (Problem.of(64, F16, order=4, signed=True), {"rows": 2, **WIDE}),
    (Problem.of(3584, BF16, FAST, order=28), {"load": "bulk", "chunks": 2, "slabs": 2, **LOOPS}),
    (Problem.of(11008, F16, FAST, order=172), {"chunks": 2, "slabs": 3}),
    (Problem.of(80, F16, order=80), {"load": "cp_async", "rows": 16, "slabs": 5}),
    (Problem.of(1280, F16, order=20), FIRST),
    (Problem.of(1536, BF16, order=12, signed=True), {**FIRST, "fold": 1}),
    (Problem.of(2560, BF16, order=20, signed=True), {**FIRST, "products": "alone", "fold": 1}),
    (Problem.of(512, F32, signed=True), {}),
    (Problem.of(64, BF16, to="mxfp4_32_rceil"), {"chunks": 2}),
    (Problem.of(1, F16, to="mxfp4_32"), {"chunks": 2}),
    (Problem.of(128, BF16, to="fp8_group_128_column_major"), {"chunks": 4, "low_bits": "mma_shuffle"}),
    (Problem.of(128, BF16, to="nvfp4_16"), {"chunks": 2}),
    (Problem.of(4096, BF16, FAST, to="int8_row_4096"), {"chunks": 4, "warps": 4, "far_bits": "lanes", **LOOPS}),
    (Problem.of(256, F32, to="int4_row_1024"), {"chunks": 2, "warps": 2}),
]


def plans_on(arch: Arch) -> list[Plan]:
    """The spread on an arch, but for problems that it has no kernels for."""
    first = {name: values[0] for name, values in KNOB_VALUES.items()}
    nearest = ((p, next(Space(p, arch).nearest(first | wanted), None)) for p, wanted in SPREAD)
    return [build_plan(p, knobs, arch) for p, knobs in nearest if knobs]
