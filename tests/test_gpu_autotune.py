"""`hadagen.autotune` on a GPU, in new processes without kernels or bundles of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from real_compilers import needs_nvrtc

pytestmark = [pytest.mark.gpu, needs_nvrtc]

BEGIN = """
import time, torch, hadagen
from hadagen.runtime.choose import bundles, tables
from hadagen.tuning_db.bundle import Bundle

arch = "sm%d%d" % torch.cuda.get_device_capability()
others = {name: path for name, path in bundles.shipped().items() if name != arch}
bundles.shipped = lambda: others  # as if nobody had measured on this GPU
own = bundles.user_directory() / f"{arch}_autotuned.db"
x = torch.randn(64, 1024, device="cuda", dtype=torch.float16)

def run_and_check():
    y = hadagen.hadamard_transform(x, 1 / 32)
    wanted = hadagen.hadamard_transform(x.double(), 1 / 32)
    assert (y.double() - wanted).norm() <= 2.2e-4 * wanted.norm()
    digest = Bundle.open(own).digest
    assert any(digest in key for _, key in tables.loaded), "another kernel ran"
"""
EXPLICIT = """
hadagen.hadamard_transform(x)  # whatever is known
began = time.monotonic()
assert hadagen.autotune({"n": 1024, "dtype": "float16"}) == own
assert time.monotonic() - began < 15
for inplace in (False, True):
    best = hadagen.best_config({"n": 1024, "dtype": "float16"}, 64, inplace=inplace)
    assert best.match is hadagen.Match.SAME_GPU and best.provenance["kind"] == "measured", best
run_and_check()
print("done")
"""
BY_VARIABLE = """
run_and_check()
print("done")
"""


def run(program: str, folder: Path, **variables: str) -> None:
    """Runs a script that does its work wherever it is imported, as training scripts do."""
    script = folder / "train.py"
    script.write_text(BEGIN + program)
    environment = {
        **os.environ,
        "HADAGEN_CACHE": str(folder / "cache"),
        "XDG_DATA_HOME": str(folder / "data"),
        **variables,
    }
    environment.pop("HADAGEN_BUNDLE", None)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, check=False)
    assert (done.stdout, done.returncode) == ("done\n", 0), done.stdout + done.stderr


def test_a_problem_is_measured_in_time_and_its_winners_run(tmp_path: Path) -> None:
    run(EXPLICIT, tmp_path)


def test_the_variable_measures_at_the_first_call_of_a_machine(tmp_path: Path) -> None:
    run(BY_VARIABLE, tmp_path, HADAGEN_AUTOTUNE="1")
    (path,) = (tmp_path / "data" / "hadagen" / "bundles").glob("*.db")
    written = path.read_bytes()
    run(BY_VARIABLE, tmp_path, HADAGEN_AUTOTUNE="1")
    assert path.read_bytes() == written
