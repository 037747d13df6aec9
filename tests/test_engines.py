"""Other projects on hadagen, by `hadagen.compat.provide`. `make engine-test` downloads them; other runs skip this."""

import os
import subprocess
import sys

import pytest

from hadagen.integrations.host import HOSTS
from hadagen.integrations.sources import missing

ENGINES = os.environ.get("HADAGEN_TEST_ENGINES", "")
pytestmark = pytest.mark.skipif(not ENGINES, reason="needs other projects: run make engine-test")


def printed(program: str) -> list[str]:
    command = [sys.executable, "-m", "hadagen.compat", sys.executable, "-W", "ignore", "-c", program]
    environment = os.environ | {"PYTHONPATH": ENGINES}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_brevitas_rotates_with_hadagen() -> None:
    """Version 0.13.4, with the matrix of order 28 too."""
    ours, error = printed(
        "import torch\n"
        "from brevitas.graph import hadamard\n"
        "import hadagen.compat.fast_hadamard_transform as ours\n"
        "x = torch.randn(3, 28 * 16)\n"
        "found = hadamard.matmul_hadU_cuda(x, *hadamard.get_hadK(x.shape[-1]))\n"
        "same = hadamard.fast_hadamard_transform.hadamard_transform is ours.hadamard_transform\n"
        "print(same, float((found - hadamard.matmul_hadU(x)).abs().max()))\n"
    )
    assert ours == "True"
    assert float(error) < 1e-5


def test_modelopt_rotates_with_hadagen() -> None:
    """Version 0.47.0, in blocks of the largest power of two."""
    ours, error = printed(
        "import torch, hadagen\n"
        "from modelopt.torch.quantization.nn import functional\n"
        "import hadagen.compat.fast_hadamard_transform as ours\n"
        "x = torch.randn(3, 5 * 64)\n"
        "found = functional.normalized_hadamard_transform(x)\n"
        "same = functional.fast_hadamard_transform.hadamard_transform is ours.hadamard_transform\n"
        "exact = hadagen.Rotation(x.shape[-1], block=64)(x)\n"
        "print(same, float((found - exact).abs().max()))\n"
    )
    assert ours == "True"
    assert float(error) < 1e-5


@pytest.mark.parametrize(
    ("host", "folder"),
    {"vllm": "VLLM", "sglang": "SGLANG", "torchao": "TORCHAO", "compressed_tensors": "LLMCOMPRESSOR"}.items(),
)
def test_the_sources_of_hosts_have_what_hooks_need(host: str, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(os.environ[f"HADAGEN_TEST_{folder}"])
    assert missing(HOSTS[host]) == []
