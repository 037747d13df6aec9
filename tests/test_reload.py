"""Hooks in other projects after `importlib.reload`, as notebooks and development servers call it."""

import subprocess
import sys

import pytest

TRANSFORMERS = """
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING as configs
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING as quantizers
from hadagen.integrations import transformers as ours

before = ours.HadagenConfig()
reload(ours)
assert (configs["hadagen"], quantizers["hadagen"]) == (ours.HadagenConfig, ours.HadagenQuantizer)
assert ours.HadagenConfig is not type(before) and ours.HadagenConfig().scheme == before.scheme
configs["hadagen"] = dict
try:
    reload(ours)
except ValueError as error:
    assert "already registered" in str(error)  # by somebody else
"""

COMPRESSED_TENSORS = """
import torch
from compressed_tensors import transform
from compressed_tensors.transform.factory.hadamard import HadamardTransform
from hadagen.integrations import compressed_tensors as ours

theirs = HadamardTransform.forward
assert ours.enable()
scheme = transform.TransformScheme(type="hadamard", precision=torch.float64)
arguments = transform.TransformArgs(targets=[], location="input")
made = transform.TransformFactory.from_scheme(scheme, name="t").create_transform(torch.nn.Linear(32, 32), arguments)
x = torch.arange(64.0, dtype=torch.float64).view(2, 32)
expected = theirs(made, x)
for _ in range(2):
    reload(ours)
    assert torch.allclose(made(x), expected)
    assert torch.equal(made(x.requires_grad_()), made(x))
    assert made(x[:0]).shape == (0, 32)
    assert ours.enable() and ours._theirs is theirs and HadamardTransform.forward is ours._forward
made.weight.requires_grad_()  # which the host multiplies, after a warning
__import__("warnings").simplefilter("ignore")
assert torch.allclose(made(x.detach()), expected)
"""

SGLANG = """
import torch
from types import SimpleNamespace
from hadagen.integrations import sglang as ours
from hadagen.integrations.host import Host

class Registry:
    hooks = []
    @classmethod
    def register(cls, target, hook, around):
        cls.hooks.append(target)

torch.version.cuda = "13.0"
Host.get = lambda self, path: Registry.register if path.endswith("register") else SimpleNamespace()
ours.register()
assert len(set(Registry.hooks)) == len(Registry.hooks) > 5
before = list(Registry.hooks)
ours.register()
reload(ours)
ours.register()
assert Registry.hooks == before
"""

VLLM = """
import sys, torch
from types import SimpleNamespace
from hadagen.integrations import vllm as ours

library = torch.library.Library("_C", "FRAGMENT")
library.define("hadacore_transform(Tensor! x, bool inplace) -> Tensor")
ours.HOST = SimpleNamespace(get=lambda path: None)
ours._hook_hadacore()
reload(ours)
assert torch.ops._C.hadacore_transform(torch.ones(1, 4), False).tolist() == [[2, 0, 0, 0]]
ours.HOST = SimpleNamespace(get=lambda path: None)
ours._hook_hadacore()
assert len(ours._operators) == 1
assert torch.ops._C.hadacore_transform(torch.ones(1, 4), False).tolist() == [[2, 0, 0, 0]]
"""

OTHERS = """
import torch
import hadagen.compat
from hadagen.compat import fast_hadamard_transform, hadacore, quarot, sglang
from hadagen.integrations import sources, transformers_cache

path = list(__import__("sys").path)
assert hadagen.compat.provide() == hadagen.compat.NAMES
for each in (hadagen.compat, fast_hadamard_transform, hadacore, quarot, sglang, sources, transformers_cache):
    reload(each)
    assert fast_hadamard_transform.hadamard_transform(torch.ones(1, 4)).tolist() == [[4, 0, 0, 0]]
assert hadagen.compat.provide() == hadagen.compat.NAMES
assert len(__import__("sys").path) == len(path) + 1
"""

# Processes of some programs each, because importing PyTorch and transformers takes seconds.
PROCESSES = {
    "compat": (OTHERS, SGLANG, VLLM),
    "transformers": (TRANSFORMERS, COMPRESSED_TENSORS),
}


@pytest.mark.parametrize("programs", PROCESSES.values(), ids=PROCESSES)
def test_a_reloaded_module_has_each_hook_once(programs: tuple[str, ...]) -> None:
    command = [sys.executable, "-c", "\n".join(("from importlib import reload", *programs))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
