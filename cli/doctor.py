"""`hadagen doctor`: what this machine can do, and what would add to it."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from itertools import groupby

import click

from hadagen import measure
from hadagen.cli import options
from hadagen.cli.output import print_fields, print_json
from hadagen.cli.sentences import TUNE_PACKAGES, explain
from hadagen.compiler.cache import KernelCache, cache_place, cache_root
from hadagen.compiler.compilers import COMPILERS, DEFAULT
from hadagen.compiler.cubin import OLDEST_DRIVERS, cuda_release
from hadagen.compiler.nvrtc import Nvrtc
from hadagen.errors import DeviceError, HadagenError, NoCompilerError, ToolchainError
from hadagen.gpu import driver, gpu_class, libcuda
from hadagen.integrations.host import HOSTS, SWITCH, Host
from hadagen.integrations.sources import installed_version, missing
from hadagen.measure.monitor import Monitor, state_text
from hadagen.owners import fault_of
from hadagen.problem.problem import DType, Problem
from hadagen.problem.target import generation, known_archs
from hadagen.runtime.choose import bundles
from hadagen.runtime.choose.device import Device, how_to_get_kernels
from hadagen.runtime.choose.entries import Match, match_of, serving
from hadagen.tuning_db.bundle import Bundle, BundleEntry

OK, MISSING, BROKEN, UNTRIED, BUSY, OFF = "ok", "missing", "broken", "untried", "busy", "off"
HOST = "host"  # the name of the checks of other projects
# What a part would add to a machine on which calls and tests work without it.
ADDS = {
    "gpu": "it would run kernels, and measure winners",
    "gpu state": "a GPU would show its power, clocks and programs",
    "kernels": "PyTorch computes the transform on the CPU",
    "tune extra": "it would bring the packages of hadagen tune and emit",
    "nvrtc": "it would compile kernels, for tuning and where a bundle has no code",
    "nvcc": "it would compile kernels with --compiler nvcc, or without NVRTC",
    "emulator": "with the tune extra and a C++ compiler, hadagen tune would verify kernels on the CPU",
}
TUNES = {
    "measured": "measures winners on this GPU",
    "estimated": "estimates winners and verifies them on the CPU; a GPU would measure them",
}


@dataclass(frozen=True)
class Check:
    """One line of the report. `missing` limits what can be done here; `broken` is installed and does not work;
    `untried` may work, but a trial needs something that is missing or broken; with `busy`, times would be wrong now;
    `off` is switched off."""

    name: str
    state: str
    says: str


class NotOk(Exception):
    """Raised by a check. Its two arguments: `MISSING`, `BROKEN` or `BUSY`, and what the check says."""


@click.command()
@options.as_json
@click.pass_context
def doctor(context: click.Context, as_json: bool) -> None:
    """Say what this machine can do, and what would add to it.

    The first lines say how calls run here, and what hadagen tune can do. The exit code is 1 only if something is
    broken: programs that are not installed, or no GPU, only limit what this machine can do.
    """
    checks = [*_examined(), *_hosts(), *_bundles()]
    abilities = _abilities({check.name for check in checks if check.state == OK})
    if as_json:
        print_json({"can": abilities, "checks": [asdict(check) for check in checks]})
    else:
        _print(checks, abilities)
    context.exit(1 if any(check.state == BROKEN for check in checks) else 0)


def _print(checks: Sequence[Check], abilities: Mapping[str, str]) -> None:
    """The verdict, and then the checks."""
    found = {check.name: check for check in checks if check.name in CHECKS}
    without_gpu = not _has_driver()
    print_fields(_verdict(checks, found, abilities, without_gpu))
    click.echo()
    lines = []
    for check in found.values():
        says = _says_optional(check, found, without_gpu)
        lines.append((check.name, "optional", says) if says else _line(check))
    hosts = [check for check in checks if check.name == HOST]
    states = ["optional" if check.state == UNTRIED else _line(check)[1] for check in hosts]
    lines += [("", state, check.says) for state, check in zip(states, hosts, strict=True)]
    lines[-len(hosts)] = ("hosts", *lines[-len(hosts)][1:])
    others = [check for check in checks if check.name not in CHECKS and check.name != HOST]
    sound = [check.says.partition(": ") for check in others if check.state == OK]
    for folder, some in groupby(sound, key=lambda parts: os.path.dirname(parts[0])):
        lines.append(("bundles", OK, folder))
        lines += [("", "", f"{os.path.basename(path)}: {rest}") for path, _, rest in some]
    lines += [_line(check) for check in others if check.state != OK]
    print_fields((f"{name:<10}  {state:<8}", says) for name, state, says in lines)


def _line(check: Check) -> tuple[str, str, str]:
    return check.name, "limited" if check.state == MISSING else check.state, check.says


def _hosts() -> list[Check]:
    """One check for each project with hooks, and one for each unknown name in HADAGEN_INTEGRATIONS."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        checks = [_host(host) for host in HOSTS.values()]
    return checks + [Check(HOST, MISSING, str(warning.message)) for warning in caught]


def _host(host: Host) -> Check:
    """The project, which is not imported."""
    found, tested, is_enabled = installed_version(host), f"tested with {host.tested}", host.is_enabled()
    if found is None:
        return Check(HOST, UNTRIED, f"{host.name} is not installed; {tested}")
    says = f"{host.name} {found}, {tested}"
    if host.has_switch and not is_enabled:
        return Check(HOST, OFF, f"{says}; {SWITCH}={os.environ[SWITCH]}")
    if lacks := missing(host):
        more = f", and {len(lacks) - 1} more" if lacks[1:] else ""
        return Check(HOST, MISSING, f"{says}; its hooks do not fit: {lacks[0]}{more}")
    return Check(HOST, OK, f"{says}; it has all {len(host.needs)} names that the hooks need")


def _verdict(
    checks: Sequence[Check], found: Mapping[str, Check], abilities: Mapping[str, str], without_gpu: bool
) -> Iterator[tuple[str, str]]:
    """How calls run here, what tuning does or needs, and what is broken."""
    if abilities["run_kernels"] == "yes":
        yield "calls", "run kernels on this GPU"
    elif without_gpu:
        yield "calls", "run on the CPU, by PyTorch; kernels run on an NVIDIA GPU"
    else:
        yield "calls", "run by PyTorch, without kernels of hadagen; see kernels below"
    yield "tuning", TUNES.get(abilities["tune"]) or f"needs {_tuning_needs(found)}; see below"
    if broken := dict.fromkeys(check.name for check in checks if check.state == BROKEN):
        yield "broken", f"{', '.join(broken)}; see below"


def _tuning_needs(found: Mapping[str, Check]) -> str:
    """The parts without which hadagen tune does nothing here."""
    parts = {"tune extra": "the tune extra", "cache": "a kernel cache to write to", "emulator": "a C++ compiler"}
    lacks = [text for name, text in parts.items() if found[name].state in (MISSING, BROKEN)]
    if {found["nvrtc"].state, found["nvcc"].state} <= {MISSING, BROKEN}:
        lacks.append("NVRTC or nvcc")
    return " and ".join(lacks)


def _says_optional(check: Check, found: Mapping[str, Check], without_gpu: bool) -> str:
    """The text for a part that is not here and that calls do without; "" for all others."""
    of_gpu = check.name in ("gpu", "gpu state", "kernels")
    if check.name not in ADDS or check.state not in (MISSING, UNTRIED) or (of_gpu and not without_gpu):
        return ""
    if of_gpu:
        return f"none here; {ADDS[check.name]}"
    if check.state == UNTRIED:
        is_for_extra = found["tune extra"].state == MISSING and found["cache"].state == OK
        return f"not tried; {ADDS[check.name]}" if is_for_extra else ""
    return f"not here; {'; '.join(filter(None, (ADDS[check.name], check.says.partition('; ')[2])))}"


def _has_driver() -> bool:
    """Whether an NVIDIA driver is installed, however old."""
    try:
        ctypes.CDLL(libcuda.SONAME)
    except OSError:
        return False
    return True


def _examined() -> list[Check]:
    """All `CHECKS`. A check that needs another check which failed is not tried, because it would be blamed for the
    other failure."""
    done: dict[str, Check] = {}
    for name, check in CHECKS.items():
        lacks = [need for need in NEEDS.get(name, ()) if done[need].state != OK]
        says = f"it cannot be tried without the {' and the '.join(lacks)}, see above"
        done[name] = Check(name, UNTRIED, says) if lacks else _checked(name, check)
    return list(done.values())


def _checked(name: str, check: Callable[[], str]) -> Check:
    try:
        return Check(name, OK, check())
    except NotOk as error:
        return Check(name, *error.args)
    except (DeviceError, ToolchainError, ModuleNotFoundError) as error:
        return Check(name, MISSING, explain(error)[0])
    except Exception as error:
        return Check(name, BROKEN, explain(error)[0])


def _python() -> str:
    return f"{platform.python_version()}, {sys.executable}"


def _torch() -> str:
    import torch

    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    return f"{torch.__version__}, {built}"


def _gpu() -> str:
    environments = [measure.device_environment(index) for index in range(max(1, _device_count()))]
    says = ", ".join(f"{e.gpu} ({options.arch_of(e)})" for e in environments)
    says += f"; driver {environments[0].driver}, CUDA {environments[0].cuda}"
    if not {options.arch_of(e) for e in environments} & set(known_archs()):
        raise DeviceError(f"{says}; hadagen has a target for {', '.join(known_archs())} only, so it cannot tune here")
    return says


def _device_count() -> int:
    return int(driver.check(driver.bindings().cuDeviceGetCount(), "counting CUDA devices"))


def _gpu_state() -> str:
    """Power limits, clocks, throttling, and the programs that use the GPUs. Not ok if times would be wrong now."""
    said, disturbed = [], []
    for index in range(_device_count()):
        environment, gpu = measure.device_environment(index), gpu_class.nvml_gpu(index)
        if gpu is None:
            raise DeviceError("NVML does not answer, so nothing notices if others use a GPU while it is measured")
        found = Monitor(gpu, environment).look()
        said.append(f"{environment.gpu}: {state_text(gpu)}")
        disturbed += [f"{found.reason}; {found.advice}"] if found else []
    if disturbed:
        raise NotOk(BUSY, "; ".join([*said, *disturbed]))
    return "; ".join(said)


def _kernels() -> str:
    """The kernels that the current GPU would run, and whether they are cubins, PTX or recipes."""
    import torch

    from hadagen.runtime.choose.device import cuda_device

    if not torch.cuda.is_available():
        raise DeviceError("PyTorch sees no GPU, so it computes the transform itself, on the CPU")
    device = cuda_device(torch.cuda.current_device())
    if device is None:
        raise DeviceError("PyTorch computes the transform itself on GPUs of another maker than NVIDIA")
    for asked in bundles.in_turn():
        for _, some in groupby(served := serving(asked, device), key=lambda bundle: bundle.arch):
            similar = list(some)
            found = [(match_of(entry, device), entry) for bundle in similar for entry in bundle.all_entries()]
            best = min((match for match, _ in found), key=list(Match).index, default=Match.GENERIC)
            if best is not Match.GENERIC:
                entries = [entry for match, entry in found if match is best]
                lacking = _lacking_code(entries, similar, device)
                says = [f"{len(entries)} winners match this GPU as {best.value}", *lacking]
                if lacking:
                    says.append(_compiled_here(device, served))
                if best is Match.ESTIMATED:
                    says += [f"none was timed on {device.arch}", how_to_get_kernels(device.arch)]
                    if device.arch in known_archs():
                        says.append("or within a program, one problem at a time: hadagen.autotune")
                return "; ".join(says)
    raise DeviceError(
        f"no bundle has kernels for this GPU, so PyTorch computes the transform; {how_to_get_kernels(device.arch)}"
    )


def _lacking_code(entries: Sequence[BundleEntry], similar: Sequence[Bundle], device: Device) -> list[str]:
    """The reasons why the code of these entries, of bundles of one arch, does not run on a GPU; [] if it runs."""
    arch, cuda, needed = similar[0].arch, _cuda_of_driver(), max(map(_cuda_of, similar))
    if arch != device.arch:
        return [f"they are for {arch}"]
    if cuda < needed:
        return [f"their cubins need a driver of CUDA {needed}, and this one is of CUDA {cuda}"]
    return [] if all(entry.compiled for entry in entries) else ["they have no cubins"]


def _compiled_here(device: Device, served: Iterable[Bundle]) -> str:
    """The compiler of kernels that have no code for a GPU. Raises `DeviceError` or `ToolchainError` if there is
    none."""
    try:
        library = Nvrtc.find()
    except NoCompilerError as error:
        if not any(entry.compiled for bundle in served for entry in bundle.all_entries()):
            raise
        return f"the driver compiles PTX of older archs instead, because {error}"
    if (newer := library.version[0]) > (cuda := _cuda_of_driver()):
        raise DeviceError(
            f"NVRTC {library.release} makes code for drivers of CUDA {newer}, and this one is of CUDA {cuda}; "
            "update the NVIDIA driver, or install an older NVRTC"
        )
    if generation(device.arch) not in library.archs:
        return f"NVRTC {library.release} does not know {device.arch}, so PTX of older archs runs; install a newer one"
    return f"NVRTC {library.release} compiles each from its recipe when it is first called"


def _cuda_of_driver() -> int:
    """The newest CUDA whose cubins the driver loads, such as 13."""
    return int(driver.check(driver.bindings().cuDriverGetVersion())) // 1000


def _cuda_of(bundle: Bundle) -> int:
    """The newest CUDA that assembled cubins of a bundle, such as 13; 0 if the cubins do not say. Only one cubin of each
    compiler is read."""
    kernels = bundle.compilers().values()
    return max((cuda_release(bundle.kernel(digest).cubin) or 0 for digest in kernels), default=0)


def _extra() -> str:
    missing = [package for package in TUNE_PACKAGES if find_spec(package) is None]
    if missing:
        raise ModuleNotFoundError(name=missing[0])
    return "all packages that tuning needs"


def _compiler(kind: str) -> str:
    """Find the compiler, and compile a kernel."""
    from hadagen.compiler.toolchain import Toolchain
    from hadagen.plan.arch import load_arch

    try:
        compiler = COMPILERS[kind].find()
        Toolchain(compiler).build_all(measure.copy_sources()[:1], load_arch(options.DEFAULT_ARCH))
    except NoCompilerError:
        raise
    except ToolchainError as error:
        raise NotOk(BROKEN, str(error)) from error
    use = "compiles kernels" if kind == DEFAULT else "compiles kernels with --compiler nvcc, or without NVRTC"
    return f"{compiler.release}, {compiler.path}; {use}"


def _emulator() -> str:
    """Runs the smallest kernel on the CPU."""
    from hadagen.compiler.codegen import render
    from hadagen.compiler.emulator import host_compiler, verify
    from hadagen.plan.arch import load_arch
    from hadagen.plan.space import Space, build_plan

    compiler = host_compiler()
    problem, arch = Problem.of(2, DType.FLOAT16), load_arch(options.DEFAULT_ARCH)
    plan = build_plan(problem, Space(problem, arch).seeds()[0], arch)
    try:
        error = max(verify(problem, render(plan)).values())
    except ToolchainError as failure:
        raise NotOk(BROKEN, str(failure)) from failure
    if error > problem.error_bound:
        raise NotOk(BROKEN, f"a kernel is off by {error:.1e} in the emulator; use another C++ compiler, see CXX")
    return f"{compiler}; kernels run on the CPU, and they are right"


def _cache() -> str:
    if problem := fault_of(cache_place()):
        raise NotOk(
            BROKEN,
            f"others could change the kernel cache, so it is not used: {problem}, or set HADAGEN_CACHE to another "
            "place",
        )
    root = cache_root()
    size = sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
    says = f"{root}, {size / 1e6:.0f} MB"
    if root.is_dir() and not os.access(root, os.W_OK):
        raise NotOk(
            MISSING,
            f"{says}; it is only read, so kernels that it lacks are compiled in each process; to tune, set "
            "HADAGEN_CACHE to a directory that can be written",
        )
    with KernelCache(root).workspace() as folder:
        (folder / "room").write_bytes(bytes(1 << 20))  # on a full disk, too, it is the cache that fails
    return says


CHECKS: dict[str, Callable[[], str]] = {
    "python": _python,
    "torch": _torch,
    "gpu": _gpu,
    "gpu state": _gpu_state,
    "kernels": _kernels,
    "tune extra": _extra,
    "cache": _cache,
    "nvrtc": partial(_compiler, "nvrtc"),
    "nvcc": partial(_compiler, "nvcc"),
    "emulator": _emulator,
}
# Check → the checks that must be sound before it, so that it says something about its own part.
NEEDS = {"gpu state": ("gpu",), "nvrtc": ("cache",), "nvcc": ("cache",), "emulator": ("tune extra", "cache")}


def _bundles() -> list[Check]:
    """One check for each bundle, and one for each that cannot be used."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            known = bundles.known()
        except HadagenError as error:
            return [Check("bundle", BROKEN, str(error))]
    checks = [_checked("bundle", partial(_verified, bundle)) for bundle in known]
    checks += [Check("bundle", BROKEN, str(warning.message)) for warning in caught]
    return checks or [Check("bundle", MISSING, "there is none; make one with: hadagen tune")]


def _verified(bundle: Bundle) -> str:
    bundle.verify_digests()
    gpus = ", ".join(gpu or "estimated" for gpu in bundle.gpus())
    return f"{bundle.path}: {bundle.arch}, {len(bundle.problems())} problems, {gpus}{oldest_driver(bundle)}"


def oldest_driver(bundle: Bundle) -> str:
    """The drivers that load the cubins of a bundle, as the end of a sentence; "" if the bundle has no cubins."""
    oldest = OLDEST_DRIVERS.get(_cuda_of(bundle))
    return f"; its cubins load from driver {oldest} on" if oldest else ""


def _abilities(sound: set[str]) -> dict[str, str]:
    """The abilities that follow from the checks that passed."""
    tune = "no"
    if "emulator" in sound and {"nvrtc", "nvcc"} & sound:  # and so what they need
        tune = "measured" if "gpu" in sound else "estimated"
    return {"run_kernels": "yes" if "kernels" in sound else "no", "tune": tune}
