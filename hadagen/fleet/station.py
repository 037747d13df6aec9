"""`Station`: the GPUs of one worker of a fleet, each with a measuring process, and its compiler."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from threading import Condition, Lock

from hadagen.compiler.cache import cache_root, locked
from hadagen.compiler.codegen import render
from hadagen.compiler.toolchain import BuildFailure, Toolchain
from hadagen.errors import DeviceError, DisturbedError, HadagenError, StorageError
from hadagen.gpu.gpu_class import uuid_of
from hadagen.measure import Cell, DeviceRunner, Variant, copy_sources, device_environment
from hadagen.owners import make_folder
from hadagen.plan.arch import Arch, load_arch
from hadagen.plan.knobs import Knobs, plan_of
from hadagen.problem.problem import Problem
from hadagen.problem.target import nearest_arch
from hadagen.problem.trial import Disturbed, Environment, Kernel, NotTried, Trial

IDLE_SECONDS = 120.0  # then a measuring process ends, and its GPU is free for others
TAKEN_SECONDS = 30.0  # the wait for a GPU on which another process measures
_LOOK_SECONDS = 0.5  # between two looks whether it still does


class GpuError(DeviceError):
    """Nothing can be measured on one GPU of a worker. `gpu`: its class."""

    def __init__(self, reason: str, gpu: str = "") -> None:  # the default is for pickle
        super().__init__(reason)
        self.gpu = gpu


@dataclass
class Gpu:
    """A GPU of a worker. `start` begins measuring on it, with copy kernels that the given toolchain compiles. `uuid`:
    names it for all processes of the machine; "" for one that no other process has."""

    environment: Environment
    arch: str
    start: Callable[[Toolchain], DeviceRunner]
    uuid: str = ""
    runner: DeviceRunner | None = None
    used: float = field(default_factory=time.monotonic)
    _lock: ExitStack | None = None  # it is ours until this is closed

    def reserve(self) -> bool:
        """Keep other workers of the user off this GPU until `rest`. False if another one keeps us off."""
        if self._lock is None:
            with ExitStack() as until:
                if self.uuid and until.enter_context(_reserved(self.uuid)) is False:
                    return False
                self._lock = until.pop_all()
        return True

    def rest(self) -> None:
        """End the measuring process, and leave the GPU to others."""
        if self.runner:
            self.runner.close()
            self.runner = None
        if self._lock:
            self._lock.close()
            self._lock = None


@contextmanager
def _reserved(uuid: str) -> Iterator[bool | None]:
    """Lock a GPU for this process. Yields whether that succeeded, or None if there is no place for locks."""
    folder = None
    with suppress(StorageError, OSError):
        folder = cache_root() / "gpus" / uuid
        make_folder(folder)
    if folder is None or not folder.is_dir():
        yield None
        return
    with locked(folder) as ours:
        yield ours


@dataclass(frozen=True)
class Greeting:
    """The answer of a worker when the search greets it.

    code: `code_digest()` on the worker. gpus: (arch, environment) of each GPU. compiling: how many kernels the worker
    compiles at once. trouble: sentences that say why it has fewer GPUs, or compiles fewer kernels, than it should.
    """

    code: str
    gpus: tuple[tuple[str, Environment], ...]
    compiling: int
    trouble: tuple[str, ...] = ()


@cache
def code_digest() -> str:
    """SHA-256 of all code and templates of hadagen. Equal ones compile and measure alike."""
    texts: dict[str, bytes] = {}
    for room in ("", "cli", "templates", "tuning_db"):  # these packages need not lie in one folder
        package = find_spec(f"hadagen.{room}".rstrip("."))
        assert package
        assert package.origin
        folder = Path(package.origin).parent
        for path in folder.rglob("*"):
            if path.is_file() and path.suffix not in (".pyc", ".db"):
                texts[Path(room, path.relative_to(folder)).as_posix()] = path.read_bytes()
    digest = hashlib.sha256()
    for name, text in sorted(texts.items()):
        digest.update(f"{name} {len(text)}\n".encode() + text)
    return digest.hexdigest()


class Station:
    """The GPUs and the compiler of one worker process. Its methods may be called by several threads.

    A GPU on which measuring fails is used no more: that raises `GpuError`.
    """

    def __init__(self, gpus: Sequence[Gpu], compiling: int, trouble: Sequence[str] = ()) -> None:
        self._compiling, self._trouble = compiling, tuple(trouble)
        self._of_class: dict[str, list[Gpu]] = {}
        for gpu in gpus:
            self._of_class.setdefault(gpu.environment.gpu, []).append(gpu)
        self._free = {name: list(all_of) for name, all_of in self._of_class.items()}
        self._freed = Condition()
        self._has_ended = False
        self._toolchains: dict[str, Toolchain] = {}
        self._lock = Lock()

    @classmethod
    def here(cls, threads: int) -> Station:
        """All GPUs that this process sees, if their arch is known. `threads` of the worker that measure on no GPU
        compile."""
        gpus, trouble = [], []
        with suppress(DeviceError):  # ends with the first that is not there
            for index in count():
                environment = device_environment(index)
                arch = f"sm{environment.compute_capability.replace('.', '')}"
                if known := nearest_arch(arch):
                    gpus.append(Gpu(environment, known, partial(_start, index, known), uuid_of(index)))
                else:
                    trouble.append(f"no kernels are made for its {environment.gpu} ({arch})")
        return cls(gpus, max(0, threads - len(gpus)), trouble)

    @property
    def resources(self) -> dict[str, float]:
        """The resources that Dask may use at once: GPUs by class, and compilers."""
        gpus = {gpu_resource(name): float(len(all_of)) for name, all_of in self._of_class.items()}
        return gpus | {COMPILERS: float(self._compiling)}

    def greeting(self, compiler: str) -> Greeting:
        """The greeting of the worker if it is to use this compiler."""
        compiling, trouble = self._compiling, self._trouble
        try:
            self._toolchain(compiler)
        except HadagenError as error:
            compiling, trouble = 0, (*trouble, f"it compiles nothing: {error}")
        gpus = tuple((gpu.arch, gpu.environment) for all_of in self._of_class.values() for gpu in all_of)
        return Greeting(code_digest(), gpus, compiling, trouble)

    def build(self, problem: Problem, knobs: Knobs, arch: Arch, compiler: str) -> Kernel | BuildFailure | NotTried:
        """Render and compile one variant."""
        source = render(plan_of(problem, knobs, starts_early=arch.starts_early))
        (built,) = self._toolchain(compiler).build([source], arch, jobs=1)
        return built

    def measure(self, variant: Variant, gpu: str, compiler: str) -> Trial | NotTried:
        """Verify and time a variant on a free GPU of that class."""
        with self._seat(gpu, compiler) as runner:
            for _, trial in runner.run([variant]):
                return trial
            raise DeviceError(f"{gpu} gave no answer")

    def race(
        self, a: Variant, b: Variant, cells: Sequence[Cell], gpu: str, compiler: str
    ) -> list[tuple[float, float]] | Disturbed:
        """Time two variants in turns on one and the same GPU of that class; `Disturbed` if that was busy or throttled
        in all attempts, which says nothing against it."""
        with self._seat(gpu, compiler) as runner:
            try:
                return list(runner.race(a, b, cells))
            except DisturbedError as error:
                return Disturbed(str(error))

    def rest(self, idle: float = 0.0) -> None:
        """End the measuring processes that were not used for so many seconds."""
        with self._freed:
            for gpu in (gpu for free in self._free.values() for gpu in free):
                if gpu.runner and time.monotonic() - gpu.used >= idle:
                    gpu.rest()

    def end(self) -> None:
        """End all measuring processes, those that measure now when they have done so."""
        self._has_ended = True
        self.rest()

    @contextmanager
    def _seat(self, name: str, compiler: str) -> Iterator[DeviceRunner]:
        gpu = self._take(name)
        works = True
        try:
            if gpu.runner is None:
                gpu.runner = gpu.start(self._toolchain(compiler))
            yield gpu.runner
        except DeviceError as error:
            works = False
            raise GpuError(str(error), name) from error
        finally:
            gpu.used = time.monotonic()
            with self._freed:
                if gpu.runner is None or self._has_ended or not works:
                    gpu.rest()
                if works:
                    self._free[name].append(gpu)
                else:
                    self._of_class[name].remove(gpu)
                self._freed.notify()

    def _take(self, name: str) -> Gpu:
        """A GPU of the class on which nobody measures. Raises `GpuError` if none works, and `DeviceError` if other
        processes have had all of them for `TAKEN_SECONDS`."""
        free, all_of = self._free[name], self._of_class[name]
        last = time.monotonic()  # the last time that one of these GPUs was ours
        with self._freed:
            while True:
                for gpu in sorted(free, key=lambda gpu: gpu.runner is None):
                    if gpu.reserve():
                        free.remove(gpu)
                        return gpu
                if not all_of:
                    raise GpuError(f"it has no {name} any more that works", name)
                if len(free) < len(all_of):
                    last = time.monotonic()
                elif time.monotonic() - last >= TAKEN_SECONDS:
                    uuids = " and ".join(f"GPU-{gpu.uuid}" for gpu in all_of)
                    raise DeviceError(
                        f"other processes measure on {name} ({uuids}), and have done so for {TAKEN_SECONDS:g} s; start "
                        "each worker of a machine with GPUs of its own in CUDA_VISIBLE_DEVICES, or one worker for all"
                    )
                self._freed.wait(_LOOK_SECONDS)

    def _toolchain(self, kind: str) -> Toolchain:
        with self._lock:
            if kind not in self._toolchains:
                self._toolchains[kind] = Toolchain.find(kind)
            return self._toolchains[kind]


COMPILERS = "hadagen-compilers"  # the resource that counts the kernels that a worker compiles at once


def gpu_resource(gpu: str) -> str:
    """The name of the resource that counts the GPUs of a class."""
    return f"hadagen-gpu {gpu}"


def _start(index: int, arch: str, toolchain: Toolchain) -> DeviceRunner:
    return DeviceRunner(index, toolchain.build_all(copy_sources(), load_arch(arch)))


def without_kernel(trial: Trial | NotTried) -> Trial | NotTried:
    """The trial as it is sent back, without its kernel, which the caller has."""
    return replace(trial, kernel=None) if isinstance(trial, Trial) else trial
