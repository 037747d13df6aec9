"""What the plugin for vLLM does without a vLLM that fits. tests/test_engine_vllm.py has vLLM."""

import sys

import pytest

from hadagen.integrations import host, vllm


def test_a_hook_that_fails_does_not_keep_vllm_from_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hadagen.integrations.host._warned", set())
    monkeypatch.setitem(sys.modules, "vllm", None)  # as if it were not installed
    monkeypatch.setattr(vllm, "_hook_hadacore", lambda: 1 // 0)
    with pytest.warns(UserWarning, match="does not use hadagen here") as caught:
        vllm.register()
    said = [str(each.message) for each in caught]
    assert len(said) == 3
    assert "it has no vllm.model_executor" in said[0]
    assert "ZeroDivisionError: integer division or modulo by zero" in said[1]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("switch", ["none", "transformers"])
def test_the_switch_leaves_vllm_alone(monkeypatch: pytest.MonkeyPatch, switch: str) -> None:
    monkeypatch.setenv("HADAGEN_INTEGRATIONS", switch)
    vllm.register()


def test_a_switch_with_an_unknown_name_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_warned", set())
    monkeypatch.setenv(host.SWITCH, "vlm, transformers")
    with pytest.warns(
        UserWarning, match="HADAGEN_INTEGRATIONS has 'vlm', which is not known; did you mean vllm"
    ) as caught:
        found = [vllm.HOST.is_enabled() for _ in range(2)]
    assert found == [False, False]
    assert len(caught) == 1
