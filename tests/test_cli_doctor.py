"""`hadagen doctor`: what it finds sound, missing or broken on a machine."""

import json
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from command_line import run, succeed, unfolded
from fake_nvml import FakeGpu, SilentGpu
from real_compilers import needs_nvrtc
from sample_bundle import write_trials
from sample_trials import H200, make_kernel, make_trial

from hadagen.cli import doctor, options
from hadagen.errors import NoCompilerError
from hadagen.gpu.gpu_class import class_name
from hadagen.integrations.host import Host, _needs
from hadagen.integrations.sources import missing as lacking
from hadagen.runtime.choose.device import Device
from hadagen.tuning_db.bundle import Bundle, shipped

pytestmark = pytest.mark.usefixtures("machine")


def test_the_doctor_finds_a_machine_without_a_gpu_sound(sample: Path) -> None:
    report = json.loads(succeed("doctor", "--json"))
    states = {check["name"]: check["state"] for check in report["checks"]}
    assert states == {
        "python": "ok",
        "torch": "ok",
        "gpu": "missing",
        "gpu state": "untried",
        "kernels": "missing",
        "tune extra": "ok",
        "nvrtc": "ok",
        "nvcc": "ok",
        "emulator": "ok",
        "cache": "ok",
        "bundle": "ok",
        "host": "untried",  # the last of them
    }
    assert report["can"] == {"run_kernels": "no", "tune": "estimated"}


@pytest.fixture
def no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_has_driver", lambda: False)


def test_the_doctor_begins_with_its_verdict(sample: Path, no_driver: None) -> None:
    calls, tuning, blank, *checks = succeed("doctor").splitlines()
    assert calls == "calls   run on the CPU, by PyTorch; kernels run on an NVIDIA GPU"
    assert tuning == "tuning  estimates winners and verifies them on the CPU; a GPU would measure them"
    assert blank == ""
    assert "gpu         optional  none here; it would run kernels, and measure winners" in checks
    assert not any("missing" in line or "error" in line or "no such file" in line.lower() for line in checks)


def test_the_doctor_says_what_optional_parts_would_add(no_driver: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> str:
        raise ModuleNotFoundError("no alembic", name="alembic")

    def no_nvcc() -> str:
        raise NoCompilerError("nvcc is not on PATH; install the CUDA toolkit")

    monkeypatch.setitem(doctor.CHECKS, "tune extra", missing)
    monkeypatch.setitem(doctor.CHECKS, "nvcc", no_nvcc)
    monkeypatch.setitem(doctor.CHECKS, "nvrtc", lambda: "it compiles kernels")
    said = succeed("doctor")
    assert "tuning  needs the tune extra; see below\n" in said
    assert (
        "tune extra optional not here; it would bring the packages of hadagen tune and emit; install it with: pip "
        "install '.[tune]' in a checkout of hadagen"
    ) in unfolded(said)
    assert (
        "nvcc optional not here; it would compile kernels with --compiler nvcc, or without NVRTC; install the CUDA "
        "toolkit"
    ) in unfolded(said)
    assert "emulator    optional  not tried; " in said


def test_the_doctor_says_why_a_gpu_that_is_there_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_has_driver", lambda: True)
    said = succeed("doctor")
    assert said.startswith("calls   run by PyTorch, without kernels of hadagen; see kernels below\n")
    assert "\ngpu         limited   " in said
    assert "\ngpu state   untried   it cannot be tried without the gpu, see above\n" in said


@pytest.mark.parametrize(
    ("gpu", "state", "says"),
    [
        (
            FakeGpu(reasons=1),
            "ok",
            "NVIDIA H200: power limit 700 W of 700 W by default, clock 1980 MHz of at most 1980 MHz, it is idle, no "
            "other process",
        ),
        (
            FakeGpu(limit=450, percent=97, listed={12: 1 << 30}, names={12: "python3"}),
            "busy",
            "NVIDIA H200, 450 W: power limit 450 W of 700 W by default, clock 1980 MHz of at most 1980 MHz, nothing "
            "slows it, process 12 (python3); process 12 (python3) or another process uses the GPU, 97 % of the time; "
            "stop it, or choose another GPU with --device or CUDA_VISIBLE_DEVICES",
        ),
        (
            SilentGpu(),
            "ok",
            "NVIDIA H200: power limit unknown, clock unknown, what slows it is unknown, other processes unknown",
        ),
        (None, "missing", "NVML does not answer, so nothing notices if others use a GPU while it is measured"),
    ],
)
def test_the_doctor_shows_the_state_of_a_gpu(
    gpu: FakeGpu | None, state: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bindings = SimpleNamespace(cuDeviceGetCount=lambda: (0, 1), cuDriverGetVersion=lambda: (0, 13000))
    environment = replace(H200, gpu=class_name("NVIDIA H200", 0, gpu))
    monkeypatch.setattr("hadagen.gpu.driver.bindings", lambda: bindings)
    monkeypatch.setattr("hadagen.measure.device_environment", lambda index: environment)
    monkeypatch.setattr("hadagen.gpu.gpu_class.nvml_gpu", lambda index: gpu)
    monkeypatch.setattr("hadagen.measure.monitor._SAMPLE_S", 0.0)
    assert doctor._checked("gpu state", doctor.CHECKS["gpu state"]) == doctor.Check("gpu state", state, says)


def test_the_doctor_blames_the_cache_where_it_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HADAGEN_CACHE", str(tmp_path / "file" / "cache"))
    result = run("doctor", "--json")
    assert result.exit_code == 1
    checks = {check["name"]: check for check in json.loads(result.stdout)["checks"]}
    assert [name for name, check in checks.items() if check["state"] == "broken"] == ["cache"]
    assert "cannot be written (Not a directory)" in checks["cache"]["says"]
    for name in ("nvrtc", "nvcc", "emulator"):
        assert (checks[name]["state"], checks[name]["says"]) == (
            "untried",
            "it cannot be tried without the cache, see above",
        )


def test_a_cache_that_is_only_read_is_not_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls read it; only tuning needs more."""
    monkeypatch.setenv("HADAGEN_CACHE", str(tmp_path))
    (tmp_path / "kernel").write_bytes(bytes(2_000_000))
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path)
    found = doctor._checked("cache", doctor.CHECKS["cache"])
    assert found.state == "missing"
    assert found.says.startswith(f"{tmp_path}, 2 MB; it is only read, so kernels that it lacks are compiled in each")


@needs_nvrtc
def test_the_doctor_tries_nvrtc_without_the_tune_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call compiles with it, and needs no extra."""

    def missing() -> str:
        raise ModuleNotFoundError("no alembic", name="alembic")

    monkeypatch.setitem(doctor.CHECKS, "tune extra", missing)
    states = {check["name"]: check["state"] for check in json.loads(run("doctor", "--json").stdout)["checks"]}
    assert (states["tune extra"], states["nvrtc"], states["emulator"]) == ("missing", "ok", "untried")


def test_the_doctor_finds_an_emulator_that_computes_nonsense(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hadagen.compiler.emulator.verify", lambda *_: {"normal": 1e-4, "large": 0.5})
    result = run("doctor", "--json")
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    (broken,) = [check for check in report["checks"] if check["state"] == "broken"]
    assert broken["name"] == "emulator"
    assert broken["says"].startswith("a kernel is off by 5.0e-01 in the emulator; use another C++ compiler")
    assert report["can"]["tune"] == "no"


@pytest.mark.parametrize(("release", "oldest"), [(12, 525), (13, 580)])
def test_the_doctor_says_which_driver_loads_a_bundle(
    release: int, oldest: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cubin = b"\x7fELF\x02\x01\x01\x41".ljust(64) + b"Cuda compilation tools, release %d.9, V" % release
    path = options.default_bundle("sm90")
    path.parent.mkdir(parents=True)
    bundle = Bundle.open(write_trials(path, [make_trial(kernel=make_kernel(cubin))]))
    assert f"its cubins load from driver {oldest} on" in unfolded(succeed("doctor"))
    monkeypatch.setattr("hadagen.gpu.driver.bindings", lambda: SimpleNamespace(cuDriverGetVersion=lambda: (0, 12080)))
    said = {12: [], 13: ["their cubins need a driver of CUDA 13, and this one is of CUDA 12"]}
    assert doctor._lacking_code(list(bundle.all_entries()), [bundle], Device("sm90")) == said[release]


def test_the_doctor_finds_a_damaged_bundle() -> None:
    path = options.default_bundle("sm90")
    path.parent.mkdir(parents=True)
    path.write_text("no bundle")
    result = run("doctor")
    assert result.exit_code == 1
    assert "\nbroken  bundle; see below\n" in result.stdout
    assert "\nbundle      broken " in result.stdout
    assert "is not a hadagen bundle" in unfolded(result.stdout)


def test_the_doctor_reads_few_of_the_winners(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the shipped bundles, whose winners are read in seconds: those of a kernel of each compiler."""
    known = [Bundle.open(path) for path in shipped().values()]
    monkeypatch.setattr("hadagen.runtime.choose.bundles.known", lambda: known)
    read: list[str] = []
    monkeypatch.setattr("hadagen.tuning_db.bundle._timed", lambda trial, *_: read.append(trial["arch"]) or trial)
    assert {check.state for check in doctor._bundles()} == {"ok"}
    assert 0 < len(read) < 200
    assert set(read) == {"sm90"}  # the only one with code


def test_the_doctor_looks_for_the_hooks_of_other_projects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By their sources. None is imported."""
    monkeypatch.setattr("hadagen.integrations.host._warned", set())
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(sys, "meta_path", [each for each in sys.meta_path if "editable" not in repr(each).lower()])
    package = tmp_path / "torchao"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError")
    source = """
        from .shown import *
        from .other import method as alone
        try:
            from missing import two
        except ImportError:
            class Base:
                def method(self, x, *, y=1, **rest): ...
            class Derived(Base):
                kind: int = 0
                @classmethod
                def made(cls, n): ...
    """
    (package / "host.py").write_text(textwrap.dedent(source))
    (package / "shown.py").write_text("shown = 1")
    (package / "other.py").write_text("def method(x): ...")
    needs = {"torchao.host": ("shown", "two", "alone(x)", "Base.method(self, x, y, rest)", "Derived.method(self)")}
    needs["torchao.host"] += ("Derived.kind", "Derived.made(n)")
    fits = Host("torchao", "torchao", "1.0", _needs(needs))

    def says(host: Host) -> tuple[str, str]:
        found = doctor._host(host)
        return found.state, found.says

    start = "torchao of an unknown version, tested with 1.0; "
    assert says(fits) == ("ok", f"{start}it has all 7 names that the hooks need")
    lost = fits._replace(needs=_needs({"torchao.host": ("gone", "Derived.gone"), "torchao.gone": ("x",)}))
    assert says(lost) == ("missing", f"{start}its hooks do not fit: it has no torchao.host.gone, and 2 more")
    other = fits._replace(needs=_needs({"torchao.host": ("Derived.made(m)",)}))
    assert says(other)[1].endswith("its hooks do not fit: torchao.host.Derived.made takes n, not m")
    assert says(fits._replace(name="nowhere")) == ("untried", "nowhere is not installed; tested with 1.0")
    monkeypatch.setenv("HADAGEN_INTEGRATIONS", "vllm, sglag")
    assert doctor._hosts()[-1].says == "HADAGEN_INTEGRATIONS has 'sglag', which is not known; did you mean sglang?"
    assert says(fits) == ("off", f"{start}HADAGEN_INTEGRATIONS=vllm, sglag")
    assert says(fits._replace(has_switch=False))[0] == "ok"


def test_a_source_that_is_no_python_is_told_and_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "strange_host"
    package.mkdir()
    (package / "__init__.py").write_text("class Marked:\n    pass\n", encoding="utf-8-sig")  # Python reads the mark
    (package / "broken.py").write_text("class Broken(:\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    needs = _needs({"strange_host": ("Marked",), "strange_host.broken": ("Broken",)})
    (said,) = lacking(Host("strange_host", "strange-host", "1.0", needs))
    assert said.startswith("the source of strange_host.broken cannot be read: invalid syntax")
