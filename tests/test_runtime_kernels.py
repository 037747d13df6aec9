"""How a call finds its kernel, and what `warmup` finds beforehand."""

import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sample_bundle import hide_bundles, remake, write_sample, write_trials, write_winners
from sample_trials import H100, LAUNCH, PROBLEM, in_clusters, make_kernel, make_trial, times

import hadagen
from hadagen import Rotation
from hadagen.compiler import recipes
from hadagen.errors import NoCompilerError, StorageError
from hadagen.gpu.driver import DoesNotFit, DriverError, LoadedKernel
from hadagen.problem.launch import ENTRY
from hadagen.problem.problem import Problem, Transform
from hadagen.problem.regimes import Destination
from hadagen.problem.trial import Environment, Kernel, Provenance, recipe_digest
from hadagen.runtime import warmup
from hadagen.runtime.call import runs, slow
from hadagen.runtime.choose import bundles, tables
from hadagen.runtime.choose.device import Device
from hadagen.runtime.choose.entries import choose_from_bundles, timed_in_bundles
from hadagen.runtime.launch import kernels, loading, streams
from hadagen.tuning_db.bundle import Bundle
from hadagen.tuning_db.bundle_writer import write_bundle
from hadagen.tuning_db.winners import WinnerCell


class Loader:
    """Stands in for `hadagen.gpu.driver.load` and notes what it was asked for."""

    def __init__(self) -> None:
        self.images: list[bytes] = []
        self.error: Exception | None = None
        self.too_large: set[bytes] = set()

    def __call__(self, image: bytes, entry: str, spec: Any, device: int) -> LoadedKernel:
        time.sleep(0.01)  # so that threads meet
        self.images.append(image)
        if self.error:
            raise self.error
        if image in self.too_large:
            raise DoesNotFit("CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", f"{image.decode()} does not fit")
        return LoadedKernel(entry, spec, device, 1, "module", "function")


@pytest.fixture
def loader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Loader]:
    """A machine with an H100 and a bundle with one kernel for it, for n = 256 in place."""
    loader = Loader()
    hide_bundles(tmp_path, monkeypatch)
    monkeypatch.setenv(bundles.VARIABLE, str(write_sample(tmp_path / "a.db")))
    for module in (kernels, slow, warmup):
        monkeypatch.setattr(module, "cuda_device", lambda index: Device("sm90", H100.gpu))
    tables.clear()
    for name in ("_told", "_seen"):
        monkeypatch.setattr(slow, name, set())
    monkeypatch.setattr(streams.driver, "load", loader)
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(recipes, "_roots", [tmp_path / "cache"])
    monkeypatch.setattr("torch.cuda.device", lambda index: nullcontext())
    yield loader
    tables.clear()


def find(elements: int = 1 << 13, device: int = 0, in_place: bool = True, problem: Problem = PROBLEM) -> Any:
    return kernels.find(kernels.Kind(device, problem, in_place), elements)


def test_a_kernel_is_loaded_once_for_all_buckets_of_a_device(loader: Loader) -> None:
    first = find()
    assert first.spec.tile_elements == 4096
    assert find(1 << 28) is first
    assert loader.images == [b"cubin 1"]
    assert find(device=1).device == 1
    assert len(loader.images) == 2


def test_without_a_compiler_the_ptx_of_an_older_arch_runs(
    loader: Loader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though there are recipes for the arch, which come first."""
    trial = make_trial(arch="sm120", environment=Environment(), provenance=Provenance.ESTIMATED, errors={})
    digest = recipe_digest(PROBLEM, trial.knobs, LAUNCH)
    trial = replace(trial, kernel=Kernel(digest, ENTRY, "sm120", "", b"", b"", LAUNCH, 0, 0, ""))
    cell = WinnerCell(PROBLEM, "sm120", "", Destination.IN_PLACE, 1 << 13)
    write_bundle(tmp_path / "sm120.db", "sm120", {cell: trial}, {digest: trial.kernel}.__getitem__, {})
    monkeypatch.setenv(bundles.VARIABLE, f"{tmp_path / 'sm120.db'}{os.pathsep}{tmp_path / 'a.db'}")
    monkeypatch.setattr(kernels, "cuda_device", lambda index: Device("sm120", "NVIDIA GeForce RTX 5090"))
    asked: list[str] = []

    def compiler_is_missing(recipe: Any, target: str) -> bytes:
        asked.append(recipe.arch)
        raise NoCompilerError("NVRTC was not found")

    monkeypatch.setattr(recipes, "image_of", compiler_is_missing)
    monkeypatch.setattr(loading, "is_right", lambda kernel, problem: True)
    monkeypatch.setattr(loading.driver, "driver_version", lambda: "535")
    assert find()
    assert (asked, loader.images) == (["sm120", "sm90"], [b"// ptx of cubin 1"])


def test_no_bundle_gives_a_digest_to_another_kernel(
    loader: Loader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels are shared by their digests, so that of one bundle would run for the problems of another."""
    monkeypatch.delenv(bundles.VARIABLE)
    other = replace(PROBLEM, transform=Transform(512))
    write_sample(bundles.user_directory() / "b.db")
    forged = write_trials(bundles.user_directory() / "a.db", [make_trial(7, problem=other)])
    with closing(sqlite3.connect(forged)) as connection, connection:
        connection.execute("UPDATE kernels SET digest = ?", (make_kernel(b"cubin 1").digest,))
    remake(forged)
    assert Bundle.open(forged).entries(other)[0].kernel == make_kernel(b"cubin 1").digest
    with pytest.warns(RuntimeWarning, match=r"goes on without a bundle: .*a\.db is damaged \(kernel .* its digest\)"):
        assert find(problem=other) is None
    assert find()
    assert loader.images == [b"cubin 1"]


def test_a_kernel_that_went_when_its_bundle_was_replaced_is_chosen_anew(
    loader: Loader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose, path = choose_from_bundles, Path(os.environ[bundles.VARIABLE])
    files = [write_sample(tmp_path / f"{chunks}.db", chunks) for chunks in (2, 3)]

    def replaced(*arguments: Any, **options: Any) -> Any:
        chosen = choose(*arguments, **options)
        if files:
            os.replace(files.pop(), path)
        return chosen

    monkeypatch.setattr(kernels, "choose_from_bundles", replaced)
    with pytest.warns() as said:
        assert find()
    assert [str(each.message) for each in said] == [f"{path} was replaced; hadagen uses what it is now"]
    assert loader.images == [b"cubin 2"]


@pytest.mark.parametrize("error", [None, DriverError("CUDA_ERROR_OUT_OF_MEMORY", "loading k failed")])
def test_threads_load_a_kernel_once(error: DriverError | None, loader: Loader) -> None:
    """Also one that does not load, of which the warning of a call tells."""
    loader.error, start = error, threading.Barrier(8)

    def work(index: int) -> LoadedKernel | None:
        start.wait()
        return find(1 << 13 if error else 1 << 10 + index)

    with ThreadPoolExecutor(8) as pool:
        (found,) = set(pool.map(work, range(8)))
    assert (found is None) == (error is not None)
    assert len(loader.images) == 1
    assert len(tables.failed) == (error is not None)


def test_a_known_bucket_opens_no_file_and_takes_no_lock(loader: Loader, monkeypatch: pytest.MonkeyPatch) -> None:
    first = find()
    monkeypatch.setattr(tables, "lock", None)
    monkeypatch.setattr(bundles, "known", None)
    assert find((1 << 13) + 256) is first


# Element counts with a kernel each, evenly spaced and not.
TIMED = {1 << 13: 1, 1 << 16: 2, 3 << 15: 4, 1 << 17: 8}


@pytest.fixture
def four_kernels(loader: Loader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = write_winners(tmp_path / "four.db", TIMED)
    monkeypatch.setenv(bundles.VARIABLE, str(path))
    return path


def test_a_call_runs_the_kernel_of_the_nearest_count(four_kernels: Path, loader: Loader) -> None:
    """Between 64K, 96K and 128K it changes at √1.5 and √3 times 64K, though nothing else is half an octave apart."""
    ran = {}
    for elements in (256, 1 << 13, 23170, 23171, 1 << 16, 80264, 80265, 3 << 15, 113511, 113512, 1 << 17, 1 << 31):
        assert find(elements) is find(elements) is not None
        ran[elements] = len(loader.images)
        _, chosen = choose_from_bundles(PROBLEM, Destination.IN_PLACE, elements, Device("sm90", H100.gpu))
        assert loader.images[-1] == b"cubin %d" % chosen[0].knobs["chunks"]
    assert list(ran.values()) == [1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4]


def test_a_bundle_that_was_replaced_goes_on_serving(four_kernels: Path, loader: Loader) -> None:
    first = find()
    write_winners(four_kernels, {1 << 15: 16, 1 << 20: 32})
    os.utime(four_kernels, ns=(0, 0))
    assert find() is first
    assert find(1 << 31)
    assert loader.images == [b"cubin 1", b"cubin 16"]  # of 128K, the largest of what was there, 32K are the nearest


def test_a_kernel_that_is_damaged_is_replaced_by_one_of_another_bundle(
    loader: Loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(bundles.VARIABLE)
    bad = write_sample(bundles.user_directory() / "a.db")
    write_sample(bundles.user_directory() / "b.db", chunks=2)
    with closing(sqlite3.connect(bad)) as connection, connection:
        connection.execute("UPDATE blobs SET cubin = (SELECT ptx FROM blobs)")
    with pytest.warns(RuntimeWarning, match=r"a\.db is damaged"):
        assert find()
    assert loader.images == [b"cubin 2"]


@pytest.mark.parametrize("current", [0, 1])
def test_a_launch_is_queued_on_the_current_stream_of_its_device(current: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    @contextmanager
    def active(device: int) -> Iterator[None]:
        calls.append(("active", device))
        yield

    monkeypatch.setattr(streams, "raw_stream", lambda device: 100 + device)
    monkeypatch.setattr(streams.driver, "active", active)
    monkeypatch.setattr(streams, "current_device", lambda: current)
    streams.queue(lambda *arguments: calls.append(arguments), 1, 16, 32)
    assert calls == [("active", 1)] * (current != 1) + [(101, 16, 32)]


@pytest.mark.parametrize(
    ("here", "pinned", "name", "fix"),
    [
        (Device("sm80", "NVIDIA A100"), True, "NVIDIA A100 (sm80)", "to make some: hadagen tune --arch sm80"),
        (Device("sm90", "GPU\x1b[2J"), False, r"GPU\x1b[2J (sm90)", "to make some: hadagen tune --arch sm90"),
    ],
)
def test_a_gpu_that_no_bundle_serves_is_told_of_once(
    here: Device, pinned: bool, name: str, fix: str, machine: Loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a program that changed one import to be fast would not see why it is not."""
    for module in (kernels, slow, warmup):
        monkeypatch.setattr(module, "cuda_device", lambda index: here)
    for module in (runs, slow):
        monkeypatch.setattr(module, "takes_kernels" if module is runs else "is_on_gpu", lambda x: True)
    if not pinned:
        monkeypatch.delenv(bundles.VARIABLE)
    x = torch.ones(4, 256)
    with pytest.warns() as caught:
        made = [hadagen.hadamard_transform(x), hadagen.hadamard_transform(x), hadagen.warmup(1024, "bfloat16")]
    assert made[2] == 0
    said = f"which is slower: no bundle has kernels for {name}; {fix}"
    assert [(str(each.message), each.category) for each in caught] == [
        (f"PyTorch computes {key} on this GPU, {said}", hadagen.SlowPathWarning)
        for key in ("n256-float32-accurate", "n1024-bfloat16-accurate")
    ]


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_compiled_code_tells_of_it_when_it_runs(loader: Loader, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one graph, which is traced without a word."""
    for module in (kernels, slow):
        monkeypatch.setattr(module, "cuda_device", lambda index: Device("sm80", "NVIDIA A100"))
    monkeypatch.setattr(runs, "takes_kernels", lambda x: True)
    monkeypatch.setattr(slow, "is_on_gpu", lambda x: True)
    traced = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        traced.append(len(slow._told))
        return graph.forward

    call = torch.compile(lambda x: hadagen.hadamard_transform(x * 2, 0.5) + 1, fullgraph=True, backend=backend)
    x = torch.randn(4, 256)
    with pytest.warns(RuntimeWarning, match=r"no bundle has kernels for NVIDIA A100 \(sm80\)"):
        y = call(x)
    assert traced == [0]
    assert torch.equal(call(x), y)
    torch.testing.assert_close(y, hadagen.hadamard_transform(x) + 1)


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_no_warning_where_no_kernel_is_missed(machine: Loader, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bundle that serves other problems, lengths and types without kernels, GPUs of another maker."""
    assert find(problem=Problem.of(512, "float16")) is None
    monkeypatch.setenv(bundles.VARIABLE, "")
    assert hadagen.warmup([1, 1 << 20], "float16") == hadagen.warmup(256, "float64") == 0
    monkeypatch.setattr(kernels, "cuda_device", lambda index: None)
    assert find() is None


def test_a_kernel_that_does_not_load_is_replaced_with_a_warning(machine: Loader) -> None:
    loader = machine
    loader.error = DriverError("CUDA_ERROR_NO_BINARY_FOR_GPU", "loading k failed; update the driver")
    assert find() is find() is None
    (why,) = tables.failed.values()
    assert why.endswith("loading k failed; update the driver")
    with pytest.warns(
        hadagen.SlowPathWarning, match=f"{PROBLEM.key} on this GPU, which is slower: .*: loading k failed"
    ):
        hadagen.warmup(256, "float16", inplace=True, rows=32, numerics="accurate")
    with pytest.raises(hadagen.UsageError, match=f"PyTorch computes {PROBLEM.key} on this GPU: .*: loading k failed"):
        hadagen.warmup(256, "float16", inplace=True, rows=32, numerics="accurate", strict=True)
    assert loader.images == [b"cubin 1", b"// ptx of cubin 1"]


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_where_a_kernel_does_not_fit_the_next_nearest_runs(four_kernels: Path, loader: Loader) -> None:
    loader.too_large = {b"cubin 2", b"cubin 4"}
    assert find(1 << 16)
    assert loader.images == [b"cubin 2", b"cubin 4", b"cubin 8"]
    assert find(1 << 17) is find(3 << 15) is find(1 << 16)
    assert len(loader.images) == 3  # what does not fit is loaded once


def test_where_large_clusters_do_not_fit_the_best_of_the_others_runs(
    loader: Loader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, middle, large = 1 << 13, 1 << 14, 1 << 15
    trials = [
        in_clusters(16, 1, timings=times({small: 1.0, middle: 9.0, large: 1.0})),
        in_clusters(8, 2, timings=times({small: 1.3, middle: 9.0, large: 9.0})),
        in_clusters(1, 4, timings=times({small: 9.0, middle: 2.0, large: 1.3})),
    ]
    monkeypatch.setenv(bundles.VARIABLE, str(write_trials(tmp_path / "clusters.db", trials)))
    device = Device("sm90", H100.gpu)
    assert timed_in_bundles(PROBLEM, Destination.IN_PLACE, device) == [small, middle, large]
    assert [find(elements) is not None for elements in (small, middle, large)] == [True] * 3
    assert loader.images == [b"cubin 1", b"cubin 4"]
    tables.found.clear()
    tables.loaded.clear()
    loader.images.clear()
    loader.too_large = {b"cubin 1"}
    assert find(small)
    assert loader.images == [b"cubin 1", b"cubin 2"]
    assert find(large) is find(middle)
    assert loader.images == [b"cubin 1", b"cubin 2", b"cubin 4"]


def test_where_none_of_a_bundle_fits_that_of_another_runs(
    loader: Loader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [write_winners(tmp_path / f"{chunks}.db", {1 << 16: chunks}) for chunks in (2, 4)]
    monkeypatch.setenv(bundles.VARIABLE, os.pathsep.join(map(str, paths)))
    loader.too_large = {b"cubin 2"}
    assert find(1 << 16)
    assert loader.images == [b"cubin 2", b"cubin 4"]


def test_no_other_is_tried_where_one_does_not_load_for_another_reason(four_kernels: Path, loader: Loader) -> None:
    loader.error = DriverError("CUDA_ERROR_OUT_OF_MEMORY", "loading k failed; free some memory")
    assert find(1 << 16) is None
    assert "free some memory" in next(iter(tables.failed.values()))
    assert loader.images == [b"cubin 2"]


def test_where_none_fits_pytorch_does_it_with_a_warning(four_kernels: Path, loader: Loader) -> None:
    loader.too_large = {b"cubin %d" % chunks for chunks in TIMED.values()}
    assert find(1 << 16) is None
    assert [*tables.failed.values()] == ["cubin 2 does not fit"]
    assert len(loader.images) == len(TIMED)


def test_a_kernel_that_does_not_load_ends_a_graph_capture(loader: Loader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: True)
    loader.error = DriverError("CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "loading k failed; call it before")
    with pytest.raises(DriverError):
        find()
    loader.error = None
    assert find()


@pytest.fixture
def machine(loader: Loader, monkeypatch: pytest.MonkeyPatch) -> Loader:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(warmup, "cuda_index", lambda device: {None: 0, "cuda:1": 1}.get(device))
    monkeypatch.setattr(warmup, "_row", lambda columns, dtype, device: torch.empty(1, columns, dtype=dtype))
    monkeypatch.setattr(runs, "takes_kernels", lambda x: True)
    return loader


def test_warmup_leaves_nothing_to_load(machine: Loader, monkeypatch: pytest.MonkeyPatch) -> None:
    assert hadagen.warmup(256, torch.float16) == 1
    assert machine.images == [b"cubin 1"]
    monkeypatch.setattr(bundles, "known", None)
    for elements in (256, 1 << 13, 1 << 31):
        assert find(elements)
        for problem in (PROBLEM, Problem.of(256, "float16", "fast"), Problem.of(256, "float16", rows="pitched")):
            find(elements, in_place=False, problem=problem)


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({}, 1),
        ({"n": [128, 256], "dtype": ["float16", torch.float32]}, 1),
        ({"n": np.int64(129), "rows": (1, 1000)}, 1),  # rows of 129 are padded to 256
        ({"device": "cuda:1", "numerics": "accurate", "inplace": True}, 1),
        ({"numerics": "fast"}, 1),  # falls back to accurate where a scale asks for it
        ({"inplace": False}, 1),  # for what has to be copied
        ({"n": 512}, 0),
        ({"n": 1}, 0),
        ({"n": 1 << 20}, 0),
        ({"dtype": torch.float64}, 0),
        ({"device": "cpu"}, 0),
        ({"device": "meta"}, 0),
        ({"device": torch.device("mps")}, 0),
    ],
)
def test_what_warmup_loads(options: dict[str, Any], count: int, machine: Loader) -> None:
    assert hadagen.warmup(**{"n": 256, "dtype": "float16", **options}) == count
    assert len(machine.images) == count


@pytest.mark.parametrize(
    ("options", "chunks"),
    [
        ({}, [1, 2, 4, 8]),
        ({"rows": 300}, [2]),
        ({"rows": (1, 400)}, [1, 4]),
        ({"rows": 1 << 30}, [8]),
        ({"n": 129, "rows": range(310, 320)}, [2, 4]),  # from 314 rows of 256 on, 96K are nearer than 64K
    ],
)
def test_warmup_loads_what_those_rows_run(
    options: dict[str, Any], chunks: list[int], machine: Loader, four_kernels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert hadagen.warmup(**{"n": 256, "dtype": "float16", **options}) == len(chunks)
    assert sorted(machine.images) == [b"cubin %d" % each for each in chunks]
    monkeypatch.setattr(bundles, "known", None)
    for rows in (3, 300, 400, 500) if "rows" not in options else warmup._several(options["rows"]):
        assert find(rows * 256)


def test_warmup_loads_what_quantizes(loader: Loader, machine: Loader, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem.of(128, "bfloat16", to="int8_row_4096")
    timings = times({1 << 13: 2.0, 1 << 16: 4.0}, Destination.OUT_OF_PLACE)
    path = Path(os.environ[bundles.VARIABLE]).with_name("b.db")
    write_trials(path, [make_trial(3, problem=problem, timings=timings, errors={"normal": 0.0})])
    monkeypatch.setenv(bundles.VARIABLE, str(path))
    assert hadagen.warmup(128, torch.bfloat16, to="int8-row", columns=4096) == 1
    assert machine.images == [b"cubin 3"]
    monkeypatch.setattr(bundles, "known", None)
    for rows in (1, 100):
        assert find(rows * 4096, in_place=False, problem=problem)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 0}, "n = 0 is not supported; give whole numbers, at least 1"),
        ({"n": [256, 2.0]}, "n = 2.0 is not supported"),
        ({"rows": True}, "rows = True is not supported"),
        ({"dtype": "int8"}, "dtype 'int8' is not supported; give a floating-point type"),
        ({"dtype": "half precision"}, "is not supported"),
        ({"dtype": 16}, "dtype 16 is not supported"),
        ({"inplace": "no"}, "inplace = 'no' is not supported; give True, False, or nothing for both"),
        ({"inplace": np.array([True, False])}, r"inplace = array\(.*\) is not supported"),
        ({"numerics": "exact"}, "numerics 'exact' is not supported"),
        ({"device": "cuda:7"}, "device 'cuda:7' is not a CUDA device of this machine"),
        ({"device": 1.5}, "device 1.5 is not a CUDA device of this machine"),
        ({"to": "fp6"}, "to = 'fp6' is no format; choose one of fp8-group"),
        ({"to": ["mxfp8", "nvfp4"], "rule": "floor"}, "rule = 'floor' does not exist for nvfp4"),
        ({"to": "mxfp8", "n": 96}, "rotation = 96 is no power of two that divides the 96 columns of x; choose one"),
        ({"to": "mxfp8", "columns": [512, 384]}, "rotation = 256 is no power of two that divides the 384 columns"),
        ({"to": "mxfp8", "n": Rotation(256), "columns": 512}, "last dimension of x is 512; this rotation takes 256"),
        ({"to": "mxfp8", "n": 16}, "groups of 32 do not fill rows of 16 elements"),
        ({"to": "mxfp8", "columns": 0}, "columns = 0 is not supported; give whole numbers, at least 1"),
        ({"columns": 512}, "columns, group, .* are those of a format; give to as well"),
        ({"layout": "swizzled"}, "are those of a format; give to as well"),
    ],
)
def test_bad_warmups(options: dict[str, Any], message: str, machine: Loader) -> None:
    with pytest.raises(ValueError, match=message):
        hadagen.warmup(**{"n": 256, "dtype": "float16", **options})
    assert machine.images == []


def test_a_bad_bundle_that_was_named_ends_calls_and_warmups(machine: Loader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(bundles.VARIABLE, "absent.db")
    for call in (find, lambda: hadagen.warmup(256, "float16")):
        with pytest.raises(StorageError, match=r"absent\.db"):
            call()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_warmup_without_a_gpu_has_nothing_to_do() -> None:
    assert hadagen.warmup(256, torch.float16) == 0
    with pytest.raises(ValueError, match="device 'cuda' is not a CUDA device of this machine"):
        hadagen.warmup(256, torch.float16, device="cuda")
