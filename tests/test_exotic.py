"""Every call that takes tensors gives a result or one sentence for tensors of any kind, in place of each of them."""

import inspect

import pytest
from exotic import ARGUMENTS, CALLS, KINDS, LONG, exotic

from hadagen.errors import HadagenError

COUNTS = "Rotation n", "quarot n", "warmup n", "warmup rotation", "warmup rows"  # numbers; PyTorch reads address 0


@pytest.mark.filterwarnings("ignore")  # of PyTorch, about nested and quantized tensors
@pytest.mark.parametrize("name", CALLS)
def test_any_tensor_is_taken_or_refused_in_a_sentence(name: str) -> None:
    dense, call = CALLS[name]
    for kind in KINDS:
        for gradient in (False, True):
            tensor = exotic(kind, dense.clone(), gradient)
            if tensor is None or (kind == "freed" and name in COUNTS):
                continue
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


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_long_or_odd_value_is_refused_in_a_short_sentence(name: str) -> None:
    call, arguments = ARGUMENTS[name]
    for argument, parameter in inspect.signature(call).parameters.items():
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        for kind, value in LONG.items():
            try:
                call(**arguments | {argument: value})
            except (HadagenError, TypeError) as error:
                said = str(error)
            except Exception as error:
                raise AssertionError(f"{argument} = {kind}") from error
            else:
                continue
            assert len(said) <= 450, (argument, kind)
            assert "\n" not in said, (argument, kind)
            assert "object" not in said, (argument, kind)  # as of Python
