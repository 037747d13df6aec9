"""The process that touches the GPU: its loop, and how the process that holds the study starts, asks and ends it.

One request is under way at a time. A worker that dies, hangs or says that it can no longer be used is replaced. The
executors of the standard library neither kill a worker that hangs nor say how one ended.

The worker is a program of its own, not a `multiprocessing.Process`: that would run the script of this process again,
and many a training script does all its work where it is imported.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, Protocol

from hadagen.errors import DeviceError
from hadagen.measure.watch import SILENCE_S, Watch

_START_ATTEMPTS = 3
_START_PAUSE_S = 1.0  # between attempts: the driver needs a moment to clear up after a killed process
_START_TIMEOUT_S = 120.0
_END_TIMEOUT_S = 10.0
# How a process ends that another one, or a system without memory, has ended. No kernel ends its process so.
_KILLED = {f"signal {int(number)}" for number in (signal.SIGKILL, signal.SIGTERM)}
# The program of the process. It finds modules where this process does, and none in the directory that it starts in.
_PROGRAM = """
import sys
sys.path[:] = filter(None, sys.path)
from multiprocessing.connection import Connection
connection = Connection(int(sys.argv[1]))
sys.path[:] = connection.recv()
from hadagen.measure.worker import serve
serve(connection, *connection.recv())
"""


class Service(Protocol):
    """The service inside the worker. Any exception of `handle` becomes a `Failure` answer."""

    @property
    def greeting(self) -> Any:
        """The first message of the worker, sent once it is ready."""

    def handle(self, request: Any) -> Any: ...

    def is_usable(self) -> bool:
        """Whether the device still answers; asked after every request."""


@dataclass(frozen=True)
class Failure:
    """Takes the place of an answer: the request failed, or the worker ended, or (`hung`) did not answer in time. The
    reason is one line for people. `killed`: the worker ended by a signal that other programs send, which says nothing
    about the request."""

    detail: str
    hung: bool = False
    killed: bool = False


@dataclass(frozen=True)
class _Reply:
    body: Any  # the service's answer, or a `Failure`
    usable: bool


@dataclass(frozen=True)
class _Beat:
    """Comes before an answer, any number of times. `watched`: whether another beat has to follow soon."""

    watched: bool


def serve(connection: Connection, make_service: Callable[..., Service], arguments: tuple[Any, ...]) -> None:
    """Body of the worker process: greet, then answer requests until the other side is gone or the device is lost."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the study decides what it means
    threading.Thread(target=_end_with_parent, daemon=True).start()
    watch = Watch(lambda watched: connection.send(_Beat(watched)))
    try:
        service = make_service(watch, *arguments)
    except Exception as error:
        connection.send(_Reply(_failure(error), usable=False))
        return
    connection.send(_Reply(service.greeting, usable=True))
    usable = True
    while usable:
        try:
            request = connection.recv()
        except EOFError:
            break
        try:
            body = service.handle(request)
        except Exception as error:
            body = _failure(error)
        usable = service.is_usable()
        connection.send(_Reply(body, usable))
    os._exit(0)  # libraries must not clean up on a device that may be lost


def _failure(error: Exception) -> Failure:
    lines = str(error).splitlines()
    return Failure(lines[0] if lines else type(error).__name__)


def _end_with_parent() -> None:
    """Ends this process, whatever it waits for, once its parent ends, however that happens: that closes the pipe which
    is the standard input here."""
    os.read(0, 1)
    os._exit(1)


class Worker:
    """The asking side. `make_service` must be importable by name; it gets a `Watch` and `arguments`. silence_s: how
    long a worker may stay silent after a beat with `watched`."""

    def __init__(
        self, make_service: Callable[..., Service], arguments: tuple[Any, ...], silence_s: float = SILENCE_S
    ) -> None:
        self._make_service = make_service
        self._arguments = arguments
        self._silence_s = silence_s
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self.is_busy = False  # with a request that no answer was received to

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self, deadline: float = inf) -> Any:
        """Brings up a fresh process and returns its greeting.

        Raises `DeviceError` where it does not come up three times, or by the deadline (of `time.monotonic()`).
        """
        for attempt in range(1, _START_ATTEMPTS + 1):
            self.stop()
            try:
                self._spawn()
                greeting = self.receive(max(0.0, min(_START_TIMEOUT_S, deadline - time.monotonic())))
            except OSError as error:  # no memory, or too many processes
                self.stop()
                greeting = Failure(str(error.strerror))
            if not isinstance(greeting, Failure):
                return greeting
            if time.monotonic() + _START_PAUSE_S >= deadline:
                break
            if attempt < _START_ATTEMPTS:
                time.sleep(_START_PAUSE_S)
        often = f" in {attempt} attempts" if attempt > 1 else ""
        raise DeviceError(
            f"the measuring process did not start{often} ({greeting.detail}); "
            "check the GPU with `hadagen doctor`, then run the same command again to go on"
        )

    def send(self, request: Any) -> None:
        """Hands over a request; the worker must be running and idle. What went wrong is for `receive` to say."""
        if self._connection is None:
            raise RuntimeError("the worker is not running")
        self.is_busy = True
        with suppress(OSError):  # it is dead
            self._connection.send(request)

    def receive(self, timeout_s: float) -> Any:
        """The answer to the last request, or a `Failure`. A process that can no longer be used is ended."""
        if self._connection is None:
            return Failure("the measuring process is not running")
        deadline, silent_until = time.monotonic() + timeout_s, inf
        try:
            while True:
                left = min(deadline, silent_until) - time.monotonic()
                if not self._connection.poll(max(0.0, left)):
                    self.stop()
                    if deadline <= silent_until:
                        return Failure(f"no answer within {timeout_s:g} s", hung=True)
                    return Failure(f"the device finished nothing within {self._silence_s:g} s", hung=True)
                reply = self._connection.recv()
                if not isinstance(reply, _Beat):
                    break
                silent_until = time.monotonic() + self._silence_s if reply.watched else inf
        except (EOFError, OSError):
            status = self._exit_status()
            return Failure(f"the measuring process ended with {status}", killed=status in _KILLED)
        except BaseException:
            self.stop()
            raise
        self.is_busy = False
        if not reply.usable:
            self.stop()
        return reply.body

    def stop(self) -> None:
        """Kills the process, if there is one. The next `start` brings up a fresh one."""
        if self._process is not None:
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_TIMEOUT_S)
            assert self._process.stdin is not None
            self._process.stdin.close()
        if self._connection is not None:
            self._connection.close()
        self._process = self._connection = None
        self.is_busy = False

    def _spawn(self) -> None:
        ours, theirs = Pipe()
        command = [sys.executable, "-c", _PROGRAM, str(theirs.fileno())]
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[theirs.fileno()])
            self._connection = ours
        finally:
            theirs.close()  # else the end of the process would not close the pipe
        with suppress(ConnectionError):  # it is dead, as `receive` will say
            ours.send(sys.path)
            ours.send((self._make_service, self._arguments))

    def _exit_status(self) -> str:
        """How the process ended that has closed its pipe."""
        assert self._process is not None
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_TIMEOUT_S)
        code = self._process.returncode
        self.stop()
        if code is None:
            return "a closed pipe"
        return f"signal {-code}" if code < 0 else f"exit status {code}"
