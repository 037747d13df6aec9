"""Every call that takes tensors gives a result or one sentence for tensors of any kind, in place of each of them."""

from __future__ import annotations

import warnings

import pytest
from exotic import CALLS, KINDS, exotic

from hadagen.errors import HadagenError

COUNTS = "Rotation n", "quarot n", "warmup n", "warmup rotation", "warmup rows"  # numbers; PyTorch reads address 0


@pytest.mark.parametrize("name", CALLS)
def test_any_tensor_is_taken_or_refused_in_a_sentence(name: str) -> None:
    dense, call = CALLS[name]
    for kind in KINDS:
        for gradient in (False, True):
            tensor = exotic(kind, dense.clone(), gradient)
            if tensor is None or (kind == "freed" and name in COUNTS):
                continue
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of PyTorch, about nested and quantized tensors
                try:
                    call(tensor)
                except (HadagenError, TypeError) as error:
                    said = str(error)
                except Exception as error:
                    raise AssertionError(f"{kind}, gradient = {gradient}") from error
                else:
                    continue
            assert "\n" not in said
            assert not said.startswith("iteration"), "of Python"
