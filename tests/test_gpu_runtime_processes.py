"""`hadamard_transform` on a GPU in processes of its own: after a fork, and without tuner or compiler."""

import os
import subprocess
import sys

import pytest
from gpu_tensors import kernels_for_this_gpu

__all__ = ["kernels_for_this_gpu"]  # a fixture
pytestmark = pytest.mark.gpu


def in_new_process(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("done\n", 0), done.stdout + done.stderr


def test_a_fork_before_cuda_is_used() -> None:
    in_new_process("""
import os
import torch, hadagen
hadagen.hadamard_transform(torch.ones(3, 256, dtype=torch.float16))
children = []
for _ in range(2):
    if not (child := os.fork()):
        y = hadagen.hadamard_transform(torch.ones(3, 256, dtype=torch.float16, device="cuda"))
        os._exit(0 if y[:, 0].eq(256).all() and y[:, 1:].eq(0).all() else 1)
    children.append(child)
assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0]
print("done")
""")


def test_a_fork_after_cuda_was_used_gets_the_error_of_pytorch() -> None:
    in_new_process("""
import os
import torch, hadagen
x = torch.ones(3, 256, dtype=torch.float16, device="cuda")
hadagen.hadamard_transform(x, inplace=True)
torch.cuda.synchronize()
if not (child := os.fork()):
    status = 1
    try:
        hadagen.hadamard_transform(x, inplace=True)
    except RuntimeError as error:
        status = 0 if "forked subprocess" in str(error) else 2
    finally:
        os._exit(status)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
print("done")
""")


def test_a_call_imports_no_tuner_and_needs_no_compiler() -> None:
    program = """
import sys
import torch
x = torch.randn(64, 4096, device="cuda", dtype=torch.float16)
before = set(sys.modules)
import hadagen
hadagen.hadamard_transform(x, inplace=True)
torch.cuda.synchronize()
from hadagen.runtime.choose import tables
assert tables.found and all(tables.found.values()), "plain PyTorch did it"
print(sorted({"optuna", "jinja2", "click", "sqlalchemy", "alembic", "pydantic", "yaml"} & set(sys.modules) - before))
"""
    environment = {**os.environ, "PATH": ""}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=False)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stdout + done.stderr
