"""Trials for the tests of the tuning database: a plain one to vary, and hypothesis strategies for arbitrary ones."""

import math
from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from hadagen.problem.launch import PARAMS, ROW_PARAMS, LaunchSpec, Param
from hadagen.problem.operands import MATRIX, SIGNS, params_for
from hadagen.problem.problem import DType, Numerics, Problem, Rows
from hadagen.problem.regimes import ELEMENT_BUCKETS, Cache, Destination, element_buckets
from hadagen.problem.scale import ScaleForm
from hadagen.problem.trial import Environment, Kernel, Outcome, Provenance, Timing, Trial, kernel_digest, knobs_key

PROBLEM = Problem.of(256, DType.FLOAT16)
MATRIX_PROBLEM = Problem.of(14336, DType.FLOAT16, order=28)
H100 = Environment("NVIDIA H100 80GB HBM3", "9.0", 132, 50 << 20, "580.65", "13.0", "13.0.48", 1980, 2619)
H200 = replace(H100, gpu="NVIDIA H200", l2_bytes=60 << 20)
LAUNCH = LaunchSpec(threads=256, cluster=1, shared_bytes=0, tile_elements=4096, persistent=False)


def launch_for(problem: Problem) -> LaunchSpec:
    """Of a kernel that takes what those of this problem do."""
    params = params_for(problem)
    return replace(LAUNCH, tile_elements=max(LAUNCH.tile_elements // problem.n, 1) * problem.n, params=params)


def make_kernel(cubin: bytes = b"cubin", **fields: Any) -> Kernel:
    known = {"source": "// source", "ptx": b"// ptx of " + cubin, "launch": LAUNCH, "registers": 40, "spill_bytes": 0}
    known |= {"entry": "k", "arch": "sm90", "cubin": cubin, "nvcc": "13.0.48", **fields}
    return Kernel(**{"digest": kernel_digest(cubin, known["launch"]), **known})


def make_timing(
    us: float = 2.0, elements: int = 1 << 13, destination: Destination = Destination.IN_PLACE, cache: Cache = Cache.HOT
) -> Timing:
    return Timing(elements, destination, cache, us, us * 0.99, us * 1.01, copy_us=1.9)


def make_trial(chunks: int = 1, **fields: Any) -> Trial:
    """A measured winner; each `chunks` is another variant with another kernel."""
    problem = fields.get("problem", PROBLEM)
    launch = launch_for(problem)
    known = {
        "problem": problem,
        "arch": "sm90",
        "knobs": {"chunks": chunks, "grid": "tiles"},
        "outcome": Outcome.OK,
        "provenance": Provenance.MEASURED,
        "kernel": make_kernel(b"cubin %d" % chunks, launch=launch),
        "errors": {"normal": 2e-4, "constant": 0.0},
        "timings": (make_timing(), make_timing(3.0, cache=Cache.COLD)),
        "environment": H100,
        "date": "2025-01-02T03:04:05+00:00",
        "seconds": 0.25,
    }
    return Trial(**{**known, **fields})


def in_clusters(blocks: int, chunks: int, **fields: Any) -> Trial:
    """`make_trial`, of a kernel in clusters of so many blocks."""
    kernel = make_kernel(b"cubin %d" % chunks, launch=replace(LAUNCH, cluster=blocks))
    return make_trial(chunks, kernel=kernel, **fields)


def times(us: Mapping[int, float], destination: Destination = Destination.IN_PLACE) -> tuple[Timing, ...]:
    """Hot and cold timings, equal, of so many microseconds at each of these element counts."""
    return tuple(make_timing(each, elements, destination, cache) for elements, each in us.items() for cache in Cache)


def _identity(trial: Trial) -> Hashable:
    """What no two trials of a store share."""
    return trial.problem, trial.arch, knobs_key(trial.knobs), trial.environment, trial.provenance


# ---- strategies ------------------------------------------------------------------------------------------------------
_positive = st.floats(min_value=0.5, max_value=1e6)
_text = st.text(max_size=8)
_count = st.integers(0, 2**31 - 1)

problems = st.builds(
    Problem.of,
    st.sampled_from([1 << k for k in range(1, 16)]),
    st.sampled_from(DType),
    st.sampled_from(Numerics),
    st.sampled_from(Rows),
) | st.sampled_from([MATRIX_PROBLEM, Problem.of(24, DType.BFLOAT16, order=24, signed=True)])
environments = st.builds(
    Environment,
    *(_text, _text, _count, st.integers(0, 2**40), _text, _text, _text, _count, _count),
    *(st.integers(0, 2**40), st.integers(0, 1000)),
) | st.sampled_from([Environment(), H100, H200])
launches = st.builds(
    LaunchSpec,
    st.sampled_from(range(32, 1025, 32)),
    st.sampled_from([1, 2, 4, 8, 16]),
    st.integers(0, 227 << 10),
    st.integers(2, 1 << 24),
    st.booleans(),
    st.sampled_from(ScaleForm),
    st.sampled_from(
        [
            PARAMS,
            (*PARAMS, *ROW_PARAMS),
            (*PARAMS, MATRIX.param, *(each.param for each in SIGNS)),
            (*PARAMS, Param("const void*", "bias")),
        ]
    ),
)
kernels = st.builds(
    make_kernel,
    st.binary(min_size=1, max_size=30),
    entry=st.from_regex("[a-z_][a-z0-9_]*", fullmatch=True),
    arch=_text,
    source=_text,
    ptx=st.binary(max_size=30),
    launch=launches,
    registers=_count,
    spill_bytes=_count,
    static_shared_bytes=_count,
    nvcc=_text,
)
timings = st.builds(
    Timing,
    st.sampled_from(ELEMENT_BUCKETS),
    st.sampled_from(Destination),
    st.sampled_from(Cache),
    _positive,
    _positive,
    _positive,
    _positive,
)
knobs = st.dictionaries(_text, st.integers(-(2**40), 2**40) | _text)
errors = st.dictionaries(_text, st.floats(min_value=0, allow_nan=False))


@st.composite
def trial_lists(draw: st.DrawFn) -> list[Trial]:
    """Trials as a store may hold them."""
    pool = {kernel.digest: kernel for kernel in draw(st.lists(kernels, min_size=1, max_size=3))}
    trials = st.builds(
        Trial,
        problems,
        st.sampled_from(["sm80", "sm90"]),
        knobs,
        st.sampled_from(Outcome),
        st.sampled_from(Provenance),
        st.none() | st.sampled_from(list(pool.values())),
        _text,
        errors,
        st.lists(timings, max_size=4).map(tuple),
        environments,
        _text,
        _positive,
    )
    return draw(st.lists(trials, max_size=6, unique_by=_identity))


def _competitor(
    chunks: int,
    problem: Problem,
    ran: tuple[Environment, Provenance],
    error: float,
    us: list[int],
) -> Trial:
    counts = element_buckets(problem)
    return make_trial(
        chunks,
        problem=problem,
        kernel=make_kernel(f"{problem.key} {chunks}".encode(), launch=launch_for(problem)),
        environment=ran[0],
        provenance=ran[1],
        errors={"normal": error},
        timings=times({elements: each / 100 for elements, each in zip(counts[:: len(counts) // 4], us, strict=False)}),
    )


def competitors() -> st.SearchStrategy[list[Trial]]:
    """Trials of few problems on few devices that compete for the same cells, their times close or equal."""
    return st.lists(
        st.builds(
            _competitor,
            st.sampled_from([1, 2, 4, 8]),
            st.sampled_from(
                [PROBLEM, PROBLEM.with_io(numerics=Numerics.FAST), PROBLEM.with_io(rows=Rows.PITCHED), MATRIX_PROBLEM]
            ),
            st.sampled_from(
                [(H100, Provenance.MEASURED), (H200, Provenance.MEASURED), (Environment(), Provenance.ESTIMATED)]
            ),
            st.sampled_from([1e-5, 1e-4, 2.2e-4, 1e-3, math.nan]),
            st.lists(st.integers(100, 105), max_size=4),
        ),
        max_size=20,
        unique_by=_identity,
    )
