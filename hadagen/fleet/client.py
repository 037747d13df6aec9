"""`Fleet`: the connection of a search to the workers of a Dask cluster."""

from __future__ import annotations

import asyncio
import re
import time
import warnings
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from ipaddress import ip_address
from threading import Thread
from typing import Any, TypeVar, cast

from distributed import Client, Future, KilledWorker, Security
from distributed.client import FutureCancelledError
from distributed.comm.addressing import get_address_host, resolve_address
from distributed.comm.core import CommClosedError

from hadagen.compiler.toolchain import BuildFailure
from hadagen.errors import DeviceError, UsageError, shown
from hadagen.fleet import work
from hadagen.fleet.station import COMPILERS, Greeting, code_digest, gpu_resource
from hadagen.measure import Cell, Variant
from hadagen.plan.arch import Arch
from hadagen.plan.knobs import Knobs
from hadagen.problem.problem import Problem
from hadagen.problem.trial import Disturbed, Environment, Kernel, NotTried, Trial, knobs_key

CONNECT_SECONDS = 10.0
LOOK_SECONDS = 1.0  # between two looks at who is there
SILENT_SECONDS = 30.0  # a worker that hangs is given up after this long; its work goes to others
GREET_SECONDS = 60.0  # a worker imports PyTorch first
CALL_SECONDS = 10.0
ATTEMPTS = 3  # of a task whose workers were in trouble
CERTIFICATES = "name the fleet's ca-file and certificates in Dask's configuration, under distributed.comm.tls"
_ADDRESS = re.compile(r"(?i)([a-z][a-z0-9+]*://)?([\w.%-]{1,253}|\[[\w:.%-]{1,99}\])(:\d{1,5})?[\d/]{0,40}")

Value = TypeVar("Value")


@dataclass(frozen=True)
class DeviceClass:
    """GPUs of a fleet that are alike. `environment`: that of the first GPU."""

    arch: str
    environment: Environment
    count: int


@dataclass(frozen=True)
class FleetState:
    """workers: how many take part. compiling: how many kernels they compile at once. gpus: class → count.
    busy: class → share of the time, since the first measurement, in which its GPUs measured. seconds: class → how long
    they measured.
    """

    workers: int
    compiling: int
    gpus: dict[str, int]
    busy: dict[str, float]
    seconds: dict[str, float]


@dataclass
class _Use:
    """How long the GPUs of a class measured, and how long they could have measured, in seconds."""

    busy: float = 0.0
    available: float = 0.0


class Fleet(AbstractContextManager["Fleet"]):
    """Workers of the Dask cluster at `address` that run `hadagen.fleet`, and compile with `compiler`.

    `archs`: the archs whose GPUs take part; None for all. `say`: gets sentences about workers that come, go or are left
    out. `look`: gets the state of the fleet about once a second. Another thread calls both.

    Certificates for TLS are those of Dask's configuration. Warns if the scheduler is reached without TLS, at an address
    that is not loopback. Raises `DeviceError` if there is no such cluster, or if it refuses the connection. As a
    context manager it leaves the cluster at the end.
    """

    def __init__(
        self,
        address: str,
        compiler: str,
        archs: Sequence[str] | None = None,
        say: Callable[[str], None] = lambda sentence: None,
        look: Callable[[FleetState], None] = lambda state: None,
    ) -> None:
        check_address(address)
        self.address, self._compiler, self._archs = address, compiler, archs
        self.say, self.look = say, look
        self.failure: DeviceError | None = None  # why the fleet is no more
        self._members: dict[str, Greeting | None] = {}  # worker address → its greeting; None if it is given no work
        self._greetings: dict[str, asyncio.Task[None]] = {}  # worker address → the greeting under way
        self._uses: dict[str, _Use] = {}
        self._seen = time.monotonic()
        self._until_the_end = ExitStack()
        self.loop = asyncio.new_event_loop()
        thread = Thread(target=self.loop.run_forever, name="hadagen-fleet", daemon=True)
        thread.start()
        self._until_the_end.callback(self.loop.close)
        self._until_the_end.callback(thread.join, CALL_SECONDS)
        self._until_the_end.callback(self.loop.call_soon_threadsafe, self.loop.stop)
        try:
            self.wait(self._connect())
            self._until_the_end.callback(lambda: self.wait(self._leave()))
            if is_open(self._client.scheduler_comm.comm.peer_address):
                warnings.warn(
                    f"anybody who reaches the Dask scheduler at {address} or its workers can run programs there, since "
                    f"they are without TLS; start them with TLS, give its tls:// address, and {CERTIFICATES}",
                    RuntimeWarning,
                    stacklevel=2,
                )
        except BaseException:
            self._until_the_end.close()
            raise

    def __exit__(self, *_: object) -> None:
        self._until_the_end.close()

    def wait(self, coroutine: Coroutine[Any, Any, Value]) -> Value:
        """The result of a coroutine on the loop of the fleet."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()

    # ---- who is there ------------------------------------------------------------------------------------------------
    @property
    def classes(self) -> list[DeviceClass]:
        """The classes of GPUs in the fleet, in the order of arch and name."""
        found: dict[tuple[str, str], list[Environment]] = {}
        for greeting in self._offers:
            for arch, environment in greeting.gpus:
                found.setdefault((arch, environment.gpu), []).append(environment)
        return [DeviceClass(arch, all_of[0], len(all_of)) for (arch, _), all_of in sorted(found.items())]

    def count(self, gpu: str) -> int:
        """How many GPUs of a class there are now."""
        return sum(each.count for each in self.classes if each.environment.gpu == gpu)

    @property
    def _offers(self) -> list[Greeting]:
        """The greetings of the workers that are given work."""
        return [greeting for greeting in list(self._members.values()) if greeting]

    @property
    def compiling(self) -> int:
        """How many kernels the workers compile at once."""
        return sum(greeting.compiling for greeting in self._offers)

    @property
    def dashboard(self) -> str:
        """The address of Dask's dashboard."""
        return str(self._client.dashboard_link)

    @property
    def state(self) -> FleetState:
        return FleetState(
            workers=len(self._offers),
            compiling=self.compiling,
            gpus={each.environment.gpu: each.count for each in self.classes},
            busy={gpu: use.busy / use.available for gpu, use in self._uses.items() if use.available},
            seconds={gpu: use.busy for gpu, use in self._uses.items()},
        )

    # ---- tasks, to be awaited on `loop` ------------------------------------------------------------------------------
    async def build(self, problem: Problem, knobs: Knobs, arch: Arch) -> Kernel | BuildFailure | NotTried:
        """Compile a variant. Classes of one arch that want the same variant at the same time share the kernel."""
        key = f"hadagen-build-{arch.name}-{problem.key}-{knobs_key(knobs.to_dict())}"
        answer = await self._do(
            lambda value: isinstance(value, (Kernel, BuildFailure, NotTried)),
            work.build,
            (problem, knobs, arch, self._compiler),
            key=key,
            resources={COMPILERS: 1},
        )
        return cast(Kernel | BuildFailure | NotTried, answer.value)

    async def measure(self, variant: Variant, gpu: str, is_sound: Callable[[Any], bool]) -> Trial | NotTried:
        """Verify and time a variant on a GPU of that class. The trial has no kernel."""
        use = self._uses.setdefault(gpu, _Use())
        answer = await self._do(
            is_sound, work.measure, (variant, gpu, self._compiler), pure=False, resources={gpu_resource(gpu): 1}
        )
        use.busy += answer.seconds
        return cast(Trial | NotTried, answer.value)

    async def race(
        self, a: Variant, b: Variant, cells: Sequence[Cell], environment: Environment
    ) -> list[tuple[float, float]] | NotTried:
        """Time two variants in turns, on one GPU with exactly this environment; `Disturbed` if that was busy or
        throttled in all attempts."""
        gpu = environment.gpu

        def alike() -> list[str]:
            return [
                address
                for address, greeting in self._members.items()
                if greeting and any(each == environment for _, each in greeting.gpus)
            ]

        if not alike():
            return NotTried(f"no {gpu} with driver {environment.driver} is there any more")
        answer = await self._do(
            lambda value: isinstance(value, Disturbed) or (isinstance(value, list) and len(value) == len(cells)),
            work.race,
            (a, b, tuple(cells), gpu, self._compiler),
            pure=False,
            resources={gpu_resource(gpu): 1},
            among=alike,
        )
        return cast(list[tuple[float, float]] | NotTried, answer.value)

    async def compute(self, function: Callable[..., Value], *arguments: Any) -> Value:
        """The result of a function that a worker computes. Raises `DeviceError` if none can."""
        answer = await self._do(
            lambda value: value is not None,
            work.compute,
            (function, *arguments),
            pure=False,
            resources={COMPILERS: 1},
        )
        if isinstance(answer.value, NotTried):
            raise DeviceError(f"{answer.value.reason}; run the same command again to go on")
        return cast(Value, answer.value)

    async def _do(
        self,
        is_sound: Callable[[Any], bool],
        task: Callable[..., work.Answer],
        arguments: tuple[Any, ...],
        among: Callable[[], list[str]] | None = None,
        **how: Any,
    ) -> work.Answer:
        """The answer of a worker. If a worker is in trouble or gives no sound answer, it gets no more work (or only its
        GPU that is to blame gets none), and another worker is asked. After `ATTEMPTS`, or without another worker, the
        value is `NotTried`. `among`: the addresses of the workers that may be asked now, if not all may."""
        reason = ""
        for _ in range(ATTEMPTS):
            if among:
                how["workers"] = among()
                if not how["workers"]:
                    break
            future = self._client.submit(task, *arguments, **how)
            try:
                answer: Any = await future
                value = answer.value if isinstance(answer, work.Answer) else None
                gpu = ""
                if isinstance(value, work.Trouble):
                    reason, gpu = value.reason, value.gpu
                elif isinstance(answer, work.Answer) and is_sound(value):
                    return answer
                else:
                    reason = f"it answered {shown(value)}, which is no result"
                await self._leave_out(await self._who_did(future), reason, gpu)
            except KilledWorker as error:
                reason = f"the workers that had it ended, {error.last_worker.address} last"
            except (FutureCancelledError, OSError):
                return work.Answer(NotTried(str(self._fail())), 0.0)
            except Exception as error:  # of the task, or of what it returned
                reason = f"{type(error).__name__}: {error}"
                await self._leave_out(await self._who_did(future), reason)
            finally:
                future.release()
        return work.Answer(NotTried(reason), 0.0)

    async def _who_did(self, future: Future[Any]) -> str:
        """The address of the worker that has the result of a task; "" if that is not known."""
        with suppress(Exception):
            found = await asyncio.wait_for(self._client.who_has([future]), CALL_SECONDS)
            return next(iter(next(iter(found.values()), ())), "")
        return ""

    # ---- the connection ----------------------------------------------------------------------------------------------
    async def _connect(self) -> None:
        connecting: Any = Client(  # type: ignore[no-untyped-call]
            self.address,
            asynchronous=True,
            timeout=CONNECT_SECONDS,
            set_as_default=False,
            security=security(self.address, "client"),
        )
        try:
            self._client = await connecting
        except Exception as error:
            with suppress(Exception):
                await asyncio.wait_for(connecting.close(), CALL_SECONDS)
            reason = (str(error) or type(error).__name__).splitlines()[0]
            if isinstance(error, CommClosedError) or not isinstance(error, (OSError, asyncio.TimeoutError)):
                raise DeviceError(
                    f"there is no connection to the Dask scheduler at {self.address} ({reason}); give its address with "
                    f"tcp:// or tls://, as the scheduler prints it, and for TLS {CERTIFICATES}"
                ) from error
            raise DeviceError(
                f"there is no Dask scheduler at {self.address} ({reason}); start one with `dask scheduler`, or give "
                "--fleet local for the GPUs of this machine"
            ) from error
        await self._look()
        self._watching = asyncio.create_task(self._watch())
        await asyncio.gather(*self._greetings.values())

    async def _leave(self) -> None:
        self._watching.cancel()
        with suppress(Exception):
            working = [address for address, greeting in self._members.items() if greeting]
            await asyncio.wait_for(self._client.run(work.rest, workers=working, on_error="ignore"), CALL_SECONDS)
        with suppress(Exception):
            await asyncio.wait_for(self._client.close(), CALL_SECONDS)

    async def _watch(self) -> None:
        while self.failure is None:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                await self._look()
            except (OSError, FutureCancelledError, asyncio.TimeoutError):
                self._fail()
            except Exception as error:
                self._fail(f"{type(error).__name__}: {error}")

    def _fail(self, reason: str = "") -> DeviceError:
        """Record that nothing more can be done with the fleet."""
        if self.failure is None:
            self.failure = DeviceError(
                f"the Dask scheduler at {self.address} is gone{reason and f' ({reason})'}; start it and its workers, "
                "then run the same command again to go on"
            )
        return self.failure

    async def _look(self) -> None:
        """Learn who came and who left."""
        await asyncio.wait_for(self._client.run_on_scheduler(_give_up_the_silent(SILENT_SECONDS)), GREET_SECONDS)
        there = (await asyncio.wait_for(self._client.scheduler.identity(n_workers=-1), GREET_SECONDS))["workers"]
        for address in self._members.keys() - there:
            if self._members.pop(address):
                self.say(f"the worker at {address} is gone; others do its work")
        for address in there.keys() - self._members.keys() - self._greetings.keys():
            # Beside this, since a worker that hangs does not answer.
            greeting = self._greetings[address] = asyncio.create_task(self._greet(address))
            greeting.add_done_callback(partial(self._greetings.pop, address))
        before, self._seen = self._seen, time.monotonic()
        for each in self.classes:
            if use := self._uses.get(each.environment.gpu):
                use.available += each.count * (self._seen - before)
        self.look(self.state)

    async def _greet(self, address: str) -> None:
        """Ask a worker what it offers, and say it if that cannot be used."""
        greeting, reason = None, ""
        try:
            call = self._client.run(work.greet, self._compiler, workers=[address], on_error="return")
            greeting = (await asyncio.wait_for(call, GREET_SECONDS)).get(address)
        except Exception as error:
            reason = f"it does not answer ({type(error).__name__})"
        if isinstance(greeting, ImportError):
            reason = f"hadagen is not there ({greeting}); install hadagen[fleet] there"
        elif greeting is None:
            reason = reason or "it was not started with --preload hadagen.fleet"
        elif not isinstance(greeting, Greeting):
            reason = f"it has another hadagen ({shown(greeting)}); install the same version there"
        elif greeting.code != code_digest():
            reason = "it has another hadagen; install the same version there"
        if reason or not isinstance(greeting, Greeting):
            self._members[address] = None
            self.say(f"the worker at {address} is left out: {reason}")
            return
        for trouble in greeting.trouble:
            self.say(f"the worker at {address}: {trouble}")
        wanted = tuple(gpu for gpu in greeting.gpus if self._archs is None or gpu[0] in self._archs)
        for arch, environment in set(greeting.gpus) - set(wanted):
            self.say(f"the {environment.gpu} of the worker at {address} is not used: it is {arch}")
        others = {each.environment.gpu: each.environment for each in self.classes}
        for _, environment in wanted:
            first = others.setdefault(environment.gpu, environment)
            if hardware(environment) != hardware(first):
                self._members[address] = None
                self.say(
                    f"the worker at {address} is left out: its {environment.gpu} is not like the others of that name "
                    f"({_difference(environment, first)}); tune it in a run of its own"
                )
                return
        self._members[address] = replace(greeting, gpus=wanted)

    async def _leave_out(self, address: str, reason: str, gpu: str = "") -> None:
        """Give a worker no more work, or only one of its GPUs of a class if it has others."""
        greeting = self._members.get(address)
        if greeting is None:
            return
        if gpu:
            at = next((i for i, (_, each) in enumerate(greeting.gpus) if each.gpu == gpu), len(greeting.gpus))
            left = greeting.gpus[:at] + greeting.gpus[at + 1 :]
            if left:
                if left != greeting.gpus:  # else it is left out already
                    self._members[address] = replace(greeting, gpus=left)
                    self.say(f"a {gpu} of the worker at {address} gets no more work: {reason}")
                return
        self._members[address] = None
        self.say(f"the worker at {address} gets no more work: {reason}")
        with suppress(Exception):
            await asyncio.wait_for(self._client.run(work.withdraw, workers=[address], on_error="ignore"), CALL_SECONDS)


def check_address(address: str) -> None:
    """Raises `UsageError` for a text that is no address of a scheduler, such as the URL of a database. The message does
    not show the text, because it may have a password."""
    if not _ADDRESS.fullmatch(address):
        raise UsageError(
            "--fleet names no address of a Dask scheduler; give an address like tls://HOST:8786, as the scheduler "
            "prints it, or local for the GPUs of this machine"
        )


def security(address: str, *roles: str) -> Security:
    """The certificates that Dask's configuration names for these roles: client, scheduler or worker. Raises
    `DeviceError` if they cannot be read, or if the address needs some that are not named."""
    named = Security()  # type: ignore[no-untyped-call]
    for role in roles:
        try:
            context = named.get_connection_args(role)["ssl_context"]  # type: ignore[no-untyped-call]
        except (OSError, ValueError) as error:  # it is not there, or is no certificate
            settings = named.get_tls_config_for_role(role)  # type: ignore[no-untyped-call]
            files = ", ".join(dict.fromkeys(filter(None, (settings[part] for part in ("ca_file", "cert", "key")))))
            raise DeviceError(
                f"Dask's configuration names certificates that cannot be used ({files}: {error}); {CERTIFICATES}"
            ) from error
        if context is None and address.startswith("tls://"):
            raise DeviceError(
                f"the Dask scheduler at {address} needs TLS, and Dask's configuration names no certificate of a "
                f"{role}; {CERTIFICATES}"
            )
    return named


def is_open(address: str) -> bool:
    """Whether a connection to this address is without TLS, and not to loopback."""
    if address.startswith(("tls://", "wss://", "inproc://")):
        return False
    try:
        return not ip_address(get_address_host(resolve_address(address))).is_loopback
    except (OSError, ValueError):  # a name that cannot be resolved
        return True


def hardware(environment: Environment) -> Environment:
    """The values that must be equal on all GPUs of a class. Drivers may differ."""
    return replace(environment, driver="", cuda="", nvcc="")


def _difference(one: Environment, other: Environment) -> str:
    values = ((name, value, getattr(other, name)) for name, value in vars(one).items())
    return ", ".join(f"{name} {mine} instead of {theirs}" for name, mine, theirs in values if mine != theirs)


def _give_up_the_silent(seconds: float) -> Callable[..., Any]:
    """A function for the scheduler: it removes the workers that hang. The scheduler may have no hadagen, so the
    function travels as a whole."""

    async def give_up(dask_scheduler: Any) -> None:
        import time

        for worker in list(dask_scheduler.workers.values()):
            if time.time() - worker.last_seen > seconds:
                await dask_scheduler.remove_worker(worker.address, stimulus_id=f"hadagen-silent-{time.time()}")

    return give_up
