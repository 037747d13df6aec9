"""Calls with DTensors, on two and four processes."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("torch.distributed.tensor")
if not torch.distributed.is_available():
    pytest.skip("this PyTorch has no torch.distributed", allow_module_level=True)

from sharded_calls import CHECKS

SCRIPT = Path(__file__).with_name("sharded_calls.py")


def on_processes(world: int) -> list[dict[str, str]]:
    """What each rank found."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", SCRIPT, str(rank), str(world), port], stdout=subprocess.PIPE, text=True
        )
        for rank in range(world)
    ]
    try:
        said = [each.communicate(timeout=120)[0].splitlines() for each in ranks]
    finally:
        for each in ranks:
            each.kill()
    # Gloo of some releases of PyTorch writes lines between them.
    return [dict(json.loads(line) for line in lines if not line.startswith("[Gloo]")) for lines in said]


@pytest.fixture(scope="module")
def of_two() -> list[dict[str, str]]:
    return on_processes(2)


@pytest.fixture(scope="module")
def of_four() -> list[dict[str, str]]:
    return on_processes(4)


@pytest.mark.parametrize("check", CHECKS)
def test_two_processes(check: str, of_two: list[dict[str, str]]) -> None:
    assert [each.get(check) for each in of_two] == ["", ""]


@pytest.mark.parametrize("check", CHECKS)
def test_four_processes(check: str, of_four: list[dict[str, str]]) -> None:
    assert [each.get(check) for each in of_four] == [""] * 4


def test_importing_hadagen_imports_no_dtensors() -> None:
    program = "import sys, torch, hadagen; hadagen.Rotation(8); print('torch.distributed.tensor' in sys.modules)"
    alone = "import sys, torch; print('torch.distributed.tensor' in sys.modules)"
    said = [
        subprocess.run([sys.executable, "-c", each], capture_output=True, text=True, check=True).stdout
        for each in (program, alone)
    ]
    assert said[0] == said[1]
