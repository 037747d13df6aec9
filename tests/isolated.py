"""Tests do the same whatever variables a person or a CI has set: this module is imported before all that reads some.

What is left says where programs, libraries and folders are, which GPUs may be used, and what tests may take besides
(HADAGEN_TEST_…). Compiled kernels, and what is tuned, go to a folder that the processes of a run share.
"""

import atexit
import locale
import os
import re
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

# Of hadagen but for its tests; of CIs; of what decides on colors, widths, languages and warnings; of what tests call.
_REMOVED = re.compile(
    r"_?HADAGEN_(?!TEST_).*|CI|GITHUB_.*|GITLAB_.*|BUILDKITE.*|TF_BUILD"
    r"|COLUMNS|LINES|NO_COLOR|FORCE_COLOR|CLICOLOR.*|PY_COLORS|TTY_.*|LANG|LANGUAGE|LC_.*"
    r"|PYTHON(?!PATH$|HOME$|DONTWRITEBYTECODE$|PYCACHEPREFIX$|NOUSERSITE$).*|PYTEST_ADDOPTS"
    r"|TORCH.*|AOT_.*|TRITON_.*|PYTORCH_.*|CUBLAS_.*|NVIDIA_TF32_OVERRIDE|NVCC_(PREPEND|APPEND)_FLAGS"
    r"|HF_.*|TRANSFORMERS_.*|ACCELERATE_.*|DASK_.*|BOKEH_.*|OPTUNA_.*|SQLALCHEMY_.*|PG[A-Z]+|GIT_.*|XDG_.*"
)
_FOLDER = "HADAGEN_TEST_FOLDER"  # set for the processes of a run by the first
# Databases wait for the disk at every commit, so temporary files go where there is none.
_IN_MEMORY = "/dev/shm"
_ROOM = 2 << 30  # bytes, several times what a run leaves behind


def _isolate() -> None:
    for name in [name for name in os.environ if _REMOVED.fullmatch(name)]:
        del os.environ[name]
    with suppress(ImportError):  # it sets these two for the processes of this one, and says nothing to Python
        import readline  # noqa: F401
    for name in ("COLUMNS", "LINES"):
        os.unsetenv(name)
    if os.access(_IN_MEMORY, os.W_OK):
        system = os.statvfs(_IN_MEMORY)
        if system.f_bavail * system.f_frsize >= _ROOM and not system.f_flag & os.ST_NOEXEC:
            os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", _IN_MEMORY)
    if _FOLDER not in os.environ:
        os.environ[_FOLDER] = tempfile.mkdtemp(prefix="hadagen-tests-", dir=os.environ.get("PYTEST_DEBUG_TEMPROOT"))
        atexit.register(_remove, os.environ[_FOLDER], os.getpid())
    folder = Path(os.environ[_FOLDER])
    os.environ |= {
        "HADAGEN_CACHE": str(folder / "cache"),
        "XDG_DATA_HOME": str(folder / "data"),
        "LC_ALL": "C.UTF-8",
        "TERM": "xterm-256color",
        # PyTorch's threads wait for each other in a loop, which takes the CPU from other tests.
        "OMP_NUM_THREADS": "1",
    }
    locale.setlocale(locale.LC_ALL, "")


def _remove(folder: str, process: int) -> None:
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)


_isolate()
