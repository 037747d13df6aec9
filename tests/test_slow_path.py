"""The warning of calls that PyTorch computes, and what `best_config` and `warmup` say of them beforehand."""

import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from emulated_device import EmulatedDevice, device
from torch._subclasses import FakeTensorMode

import hadagen
from hadagen import Rotation, SlowPathWarning, UsageError, best_config, hadamard_transform, prologues, rotate_quantize
from hadagen.compiler import recipes
from hadagen.problem.formats import Format
from hadagen.problem.problem import Problem
from hadagen.problem.regimes import Destination
from hadagen.problem.scale import ScaleForm
from hadagen.runtime import warmup
from hadagen.runtime.call import slow
from hadagen.runtime.choose import reasons, tables
from hadagen.runtime.choose.device import Device
from hadagen.runtime.choose.entries import has_kernel, timed_in_bundles
from hadagen.runtime.choose.reasons import Asked, why_none
from hadagen.runtime.launch import kernels

__all__ = ["device"]  # a fixture
SM90 = Device("sm90", "NVIDIA H100 80GB HBM3")
HALF = torch.float16


@pytest.fixture
def gpu(device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch) -> Iterator[EmulatedDevice]:
    """Tensors on the CPU, as if they were on an H100, with the shipped kernels."""
    monkeypatch.setattr(slow, "is_on_gpu", lambda x: x.numel() > 0)
    monkeypatch.setattr(slow, "cuda_device", lambda index: SM90)
    for name in ("_told", "_seen"):
        monkeypatch.setattr(slow, name, set())
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: False)
    yield device
    tables.clear()


def said_by(*calls: Callable[[], Any]) -> list[str]:
    """The warnings of calls, which are of one category."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for call in calls:
            call()
    assert {each.category for each in caught} <= {SlowPathWarning}
    assert all(each.filename == __file__ for each in caught), "a filter of the caller's module would not match"
    return [str(each.message) for each in caught]


def matrix_of_32() -> Rotation:
    """Float32 with a matrix has no kernel."""
    return Rotation(896)


def test_once_for_each_problem(gpu: EmulatedDevice) -> None:
    x = torch.ones(3, 64, dtype=torch.float64)
    said = said_by(
        lambda: hadamard_transform(x),
        lambda: hadamard_transform(x),
        lambda: hadamard_transform(x[:2], inplace=True),
        lambda: hadamard_transform(x, out=x.clone()),
        lambda: hadamard_transform(x, 0.5),
    )
    assert said == [
        "PyTorch computes n = 64 of float64 on this GPU, which is slower: float64 has no kernels; pass float16, "
        "bfloat16 or float32"
    ]
    other = torch.ones(3, 128, dtype=torch.float64)
    assert len(said_by(lambda: hadamard_transform(other), lambda: hadamard_transform(x))) == 1


def test_no_word_where_a_kernel_runs_or_no_gpu_is_asked(gpu: EmulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy in between is not a slow path."""
    x = torch.ones(4, 256, dtype=HALF)
    calls = [
        lambda: hadamard_transform(x),
        lambda: hadamard_transform(x.T.contiguous().T),
        lambda: hadamard_transform(x[:, :200]),
        lambda: Rotation(256, block=64)(x[:, 0:256:1]),
        lambda: rotate_quantize(x, 64, to="mxfp8"),
        lambda: hadamard_transform(torch.ones(0, 256, dtype=torch.float64)),
    ]
    assert said_by(*calls) == []
    monkeypatch.undo()
    assert said_by(lambda: hadamard_transform(x.double())) == []


def test_filters_silence_it_or_make_it_an_error(gpu: EmulatedDevice) -> None:
    """An error writes nothing, and the next call gives it again."""
    x, rotation = torch.ones(2, 896), matrix_of_32()
    out, wide = torch.zeros(2, 896), torch.ones(2, 64, dtype=torch.float64)
    calls: list[Callable[[], Any]] = [
        lambda: hadamard_transform(wide, inplace=True),
        lambda: rotation(x, inplace=True),
        lambda: rotation(x, out=out),
        lambda: rotation(x[:, :], out=out.T.contiguous().T),
        lambda: rotate_quantize(x, rotation, to="int8-row"),
        lambda: hadamard_transform(wide, before=prologues.SiluMul()),
    ]
    for call in calls * 2:
        with warnings.catch_warnings():
            warnings.simplefilter("error", SlowPathWarning)
            with pytest.raises(SlowPathWarning, match="PyTorch computes "):
                call()
        assert not slow._told
        assert not slow._seen
        assert not tables.calls
    assert (x == 1).all()
    assert (wide == 1).all()
    assert (out == 0).all()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SlowPathWarning)
        calls[1]()
    assert said_by(calls[2]) == []  # of the same problem


def test_none_while_a_graph_is_captured(gpu: EmulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(2, 64, dtype=torch.float64)
    with monkeypatch.context() as patch:
        patch.setattr("torch.cuda.is_current_stream_capturing", lambda: True)
        assert said_by(lambda: hadamard_transform(x)) == []
    assert len(said_by(lambda: hadamard_transform(x))) == 1


def test_none_while_torch_compiles(gpu: EmulatedDevice) -> None:
    """The compiled code gives it when it runs."""
    traced: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        traced.append(len(slow._told))
        return graph.forward

    x, rotation = torch.ones(2, 896), matrix_of_32()
    call = torch.compile(lambda x: rotation(x * 2) + 1, fullgraph=True, backend=backend)
    assert len(said_by(lambda: call(x), lambda: call(x))) == 1
    assert traced == [0]
    with FakeTensorMode():
        fake = torch.ones(2, 128, dtype=torch.float64)
        assert said_by(lambda: hadamard_transform(fake)) == []


def test_one_for_each_call(gpu: EmulatedDevice) -> None:
    """A call of several parts that PyTorch computes gives the reason of the first."""
    x, rotation = torch.ones(2, 896), matrix_of_32()
    (said,) = said_by(lambda: rotate_quantize(x, rotation, to="int8-row"))
    assert said.startswith(
        "PyTorch computes n896-k28-float32-to-int8_row_896-accurate on this GPU, which is slower: an mma "
    )
    y, gated = torch.ones(2, 1792), prologues.SiluMul()
    (said,) = said_by(lambda: rotate_quantize(y, rotation, to="fp8-row", before=gated))
    assert "n896-k28-after-silu_mul-float32-to-fp8_row_896-accurate" in said
    gpu.without.add("n128-after-silu_mul_sglang-float32-accurate")
    long = torch.ones(2, 600)
    (said,) = said_by(lambda: hadamard_transform(long, before=gated))
    assert "no kernel transforms rows of 300 elements after silu_mul; pass rows of a power of two" in said
    z = torch.ones(2, 896, requires_grad=True)
    (said,) = said_by(lambda: rotate_quantize(z, rotation, to="int4-row", gradient=True))
    assert "int4_row" in said
    half = torch.ones(2, 1792, dtype=HALF, requires_grad=True)
    assert said_by(lambda: rotation(half, before=gated).sum().backward()) == []


def test_a_matrix_is_made_without_a_word(gpu: EmulatedDevice) -> None:
    assert said_by(lambda: Rotation(64).matrix()) == []


def test_a_call_during_an_error_of_another_thread_hides_no_warning(
    gpu: EmulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one thread looks for the reason, another one calls."""
    x = torch.ones(2, 64, dtype=torch.float64)
    others = []

    def reason(*_: Any) -> str:
        if not others:
            others.append(threading.Thread(target=hadamard_transform, args=(x,)))
            others[0].start()
            others[0].join()
        return "none"

    monkeypatch.setattr(slow, "why_none", reason)
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("error", SlowPathWarning)
            with pytest.raises(SlowPathWarning):
                hadamard_transform(x)
    assert len(said_by(lambda: hadamard_transform(x))) == 1


def test_several_devices_are_told_of(gpu: EmulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(2, 64, dtype=torch.float64)
    assert len(said_by(lambda: hadamard_transform(x))) == 1
    what = Asked(64, "float64", destination=Destination.IN_PLACE)
    with pytest.warns(SlowPathWarning):
        slow.tell(1, what)
    monkeypatch.setattr(slow, "cuda_device", lambda index: None)
    with pytest.warns(SlowPathWarning, match="GPUs of another maker"):
        slow.tell(2, what)


REASONS: list[tuple[Asked, str]] = [
    (Asked(64, "float64"), "float64 has no kernels; pass float16, bfloat16 or float32"),
    (
        Asked(1 << 20, "float16"),
        "no kernel has rows or blocks of 1048576 elements, but of up to 131072; rotate in blocks",
    ),
    (
        Asked(60 * 44 * 2, "float16", orders=(60, 44)),
        "no kernel multiplies by matrices of the orders 60 · 44, but by one",
    ),
    (Asked(924 * 32, "float16", orders=(924,)), "by a matrix of order 924, but of up to 428; rotate in blocks of 128"),
    (
        Asked(300 * 64, "float16", orders=(300,), real=True),
        "of 300² real numbers and an H of order 64, but by up to 192²",
    ),
    (Asked(896, "float32", orders=(28,)), "an mma multiplies 16-bit values by a matrix; pass bfloat16 or float16, or "),
    (Asked(64, "float16", swapped=True), "the regular matrix has kernels only where the result is quantized"),
    (
        Asked(1, "bfloat16", 1 << 20, form=Format.choose("fp8-row", None, None, "row-major")),
        "a thread's values do not fit its registers; take rows of up to 851968 elements",
    ),
    (
        Asked(5632, "bfloat16", 50688, (44,), form=Format.choose("fp8-row", None, None, "row-major")),
        "values, or the matrix and its sums, do not fit the registers; take rows of up to 45056 elements, or rotate in "
        "blocks of 512",
    ),
    (
        Asked(48, "bfloat16", 48, (12,), form=Format.choose("mxfp8", None, None, "row-major")),
        "groups of 32 do not fill rows of 48 elements; pad them, or choose a group that does",
    ),
    (
        Asked(96, "bfloat16", 192, (12,), form=Format.choose("fp8-group", 64, None, "row-major")),
        "groups of 64 do not fill rows of 96, nor rows groups; choose another",
    ),
    (
        Asked(1, "float16", 1023, form=Format.choose("int8-row", None, None, "row-major")),
        "rows of 2046 bytes are no multiple of 16 bytes; pad rows to 1024 elements",
    ),
    (
        Asked(1, "float16", 12, form=Format.choose("int8-row", None, None, "row-major")),
        "groups of 12 elements have no kernel; pad rows to 16 elements or more",
    ),
    (
        Asked(2, "float16", prologue="silu_mul"),
        "a prologue has rows of 16 bytes at least; compute silu_mul before the ",
    ),
]


@pytest.mark.parametrize(("asked", "reason"), REASONS, ids=lambda each: each if isinstance(each, str) else "")
def test_reasons_name_the_value_the_limit_and_the_fix(asked: Asked, reason: str) -> None:
    found = why_none(asked, SM90)
    assert found is not None
    assert reason in found
    assert "; " in found


def test_what_is_advised_has_a_kernel() -> None:
    """On a GPU without clusters, 53248 is the most, and one block more has none."""
    form, sm80 = Format.choose("fp8-row", None, None, "row-major"), Device("sm80", "NVIDIA A100-SXM4-80GB")
    for columns, has in ((53248, True), (53248 + 64, False)):
        assert (why_none(Asked(1, "bfloat16", columns, form=form), sm80) is None) is has
    assert why_none(Asked(896, "bfloat16", orders=(28,)), SM90) is None
    assert why_none(Asked(2048, "float32"), SM90) is None


def test_a_gpu_without_a_bundle() -> None:
    found = why_none(Asked(64, "float16"), Device("sm70", "Tesla V100"))
    assert str(found).startswith("no bundle has kernels for Tesla V100 (sm70); hadagen makes kernels for ")


def test_tensors_that_no_kernel_takes(gpu: EmulatedDevice) -> None:
    """Though there are kernels of the problem."""
    x, one = torch.ones(1, 24, dtype=HALF), torch.ones(())
    said = said_by(
        lambda: rotate_quantize(x, to="fp8-tensor", tensor_scale=one),
        lambda: rotate_quantize(x.expand(3, 24), to="fp8-tensor", tensor_scale=one),
    )
    why = "kernels take a multiple of 16 elements, and the result has 24; pad the rows of x"
    assert said == [f"PyTorch computes n1-float16-to-fp8_tensor-accurate on this GPU, which is slower: {why}"]


def test_a_scale_that_no_kernel_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = SimpleNamespace(scale_form=ScaleForm.FLOAT16_CORRECTED)
    monkeypatch.setattr(reasons, "choose_from_bundles", lambda *_, **__: (None, (SimpleNamespace(launch=launch), None)))
    asked = Asked(4096, "float16", scale=1e-9)
    assert why_none(asked._replace(scale=1.0), SM90) is None
    said = "scale = 1e-09 is out of the range of its kernels; pass one from 6.1e-05 to 3.28e+04"
    assert why_none(asked, SM90) == said


def test_without_the_generator_there_is_a_reason_too(monkeypatch: pytest.MonkeyPatch) -> None:
    recipes.why_no_knobs.cache_clear()
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "hadagen.plan.space", None)
        found = why_none(Asked(896, "float32", orders=(28,)), SM90)
    assert str(found).startswith("no kernel is made for n896-k28-float32-accurate: kernels cannot be generated")


# ---- before the call -------------------------------------------------------------------------------------------------
def test_best_config_says_it() -> None:
    found = best_config(Rotation(896), "float32", rows=8, arch="sm90")
    assert found.reason == found.to_dict()["reason"] == why_none(Asked(896, "float32", orders=(28,)), Device("sm90"))
    assert best_config(Rotation(896), "float16", rows=8, arch="sm90").reason is None
    with pytest.raises(UsageError, match="no kernel computes this Rotation, so PyTorch does: no kernel multiplies by"):
        best_config(Rotation(29568), "float16", rows=8, arch="sm90")


@pytest.fixture
def warm(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """A machine with an H100, and what is loaded there."""
    loaded: list[Any] = []
    tables.clear()
    for module in (kernels, warmup, slow):
        monkeypatch.setattr(module, "cuda_device", lambda index: SM90)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(warmup, "cuda_index", lambda device: 0)
    monkeypatch.setattr(warmup, "_row", lambda columns, dtype, device: torch.empty(1, columns, dtype=dtype))
    monkeypatch.setattr("hadagen.runtime.call.runs.takes_kernels", lambda x: True)
    monkeypatch.setattr(warmup, "compile_missing", lambda chosen, target: None)
    monkeypatch.setattr(kernels, "find", lambda *kind: loaded.append(kind))
    yield loaded
    tables.clear()


@pytest.mark.parametrize(
    ("arguments", "options", "said"),
    [
        (
            (64, "float64"),
            {},
            "PyTorch computes n = 64 of float64 on this GPU: float64 has no kernels",
        ),
        (
            ([64, 1 << 20], "float16"),
            {"numerics": "accurate"},
            "PyTorch computes n = 1048576 of float16 on this GPU: no",
        ),
        ((Rotation(896), "float32"), {"to": "mxfp8"}, "n896-k28-float32-to-mxfp8_32-accurate.* on this GPU: an mma"),
        (
            (Rotation(896), "float32"),
            {"before": "silu_mul"},
            "n896-k28-after-silu_mul-float32-accurate on this GPU: an",
        ),
    ],
    ids=str,
)
def test_a_strict_warmup_refuses_before_it_loads(
    arguments: tuple[Any, ...], options: dict[str, Any], said: str, warm: list[Any]
) -> None:
    with pytest.raises(UsageError, match=said):
        hadagen.warmup(*arguments, **options, strict=True)
    assert warm == []
    hadagen.warmup(*arguments, **options)


def test_a_strict_warmup_loads_what_has_kernels(warm: list[Any]) -> None:
    hadagen.warmup([64, 300], ["float16", "float32"], strict=True)
    hadagen.warmup(Rotation(896), HALF, to="int8-row", before="silu_mul", strict=True)
    assert warm


def test_a_strict_warmup_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert hadagen.warmup(64, "float16") == 0
    with pytest.raises(
        UsageError, match="no kernel runs on device 'cpu', so PyTorch computes these calls; name a CUDA"
    ):
        hadagen.warmup(64, "float16", strict=True)
    with pytest.raises(UsageError, match="strict = 'yes' is not"):
        hadagen.warmup(64, "float16", strict="yes")  # type: ignore[arg-type]


# ---- the rule of kernels ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "key",
    [
        "n896-k28-signed-bfloat16-to-int8_row_896-accurate",
        "n896-k28-float32-accurate",
        "n128-float32-to-fp8_row_53248-accurate",
        "n128-after-silu_mul-float32-to-fp8_row_36864-accurate",
        "n53248-k104-after-silu_mul-float16-to-fp8_row_53248-accurate",
        "n4096-float16-fast",
        "n4096-float16-accurate-pitched",
        "n64-signed-bfloat16-to-mxfp4_32-accurate",
    ],
)
def test_whether_there_is_a_kernel_is_what_calls_find(key: str) -> None:
    problem = Problem.parse(key)
    found = bool(timed_in_bundles(problem, Destination.OUT_OF_PLACE, SM90))
    assert has_kernel(problem, Destination.OUT_OF_PLACE, SM90) == found
    asked = Asked.of(problem, problem.unit, Destination.OUT_OF_PLACE, False)
    assert asked.problem == problem
    assert (reasons.why_none(asked, SM90) is None) == found
