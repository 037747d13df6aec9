"""Arch files: the shipped ones load, and each mistake in one is answered with a sentence that says what to correct."""

import pickle
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from hadagen.errors import UsageError
from hadagen.plan.arch import Arch, Feature, Limits, load_arch, read_arch
from hadagen.plan.knobs import KNOB_VALUES
from hadagen.problem.target import ARCH_DIRECTORY, known_archs


@pytest.fixture
def values() -> dict[str, Any]:
    values = yaml.safe_load((ARCH_DIRECTORY / "sm90.yaml").read_text())
    assert isinstance(values, dict)
    return values


@pytest.fixture
def read(tmp_path: Path) -> Callable[[Any], Arch]:
    def read(values: Any) -> Arch:
        path = tmp_path / "sm90.yaml"
        path.write_text(values if isinstance(values, str) else yaml.safe_dump(values))
        return read_arch(path)

    return read


def test_an_arch_that_was_not_written_for_programs_without_yaml_says_how(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "archs.json").write_text("{}")
    monkeypatch.setattr("hadagen.plan.arch._ARCHS", tmp_path / "archs.json")
    with pytest.raises(UsageError, match=r"arch sm90 is not in archs\.json yet; run make archs"):
        load_arch.__wrapped__("sm90")


@pytest.mark.parametrize("name", known_archs())
def test_what_programs_without_yaml_read_is_what_the_file_says(name: str) -> None:
    assert load_arch(name) == read_arch(ARCH_DIRECTORY / f"{name}.yaml")


@pytest.mark.parametrize("name", known_archs())
def test_every_shipped_file_loads(name: str) -> None:
    arch = load_arch(name)
    assert arch.name == name
    assert max(arch.search["warps"]) * 32 <= arch.limits.threads_per_block
    limits = arch.limits
    assert limits.shared_per_block + limits.shared_reserved_per_block == limits.shared_per_sm
    assert (limits.cluster_blocks > 1) == ("cluster" in arch.features)


def test_hopper_is_as_nvidia_documents_it() -> None:
    arch = load_arch("sm90")
    assert arch.compute_capability == "9.0"
    assert arch.limits == Limits(
        threads_per_block=1024,
        threads_per_sm=2048,
        blocks_per_sm=32,
        registers_per_thread=255,
        registers_per_sm=64 * 1024,
        shared_per_block=227 * 1024,
        shared_per_sm=228 * 1024,
        shared_reserved_per_block=1024,
        cluster_blocks=16,  # where a kernel asks for more than the portable 8
    )
    assert arch.features == set(get_args(Feature))


def test_what_a_file_does_not_say_is_as_in_the_file_that_it_is_like() -> None:
    hopper, turing = load_arch("sm90"), load_arch("sm75")
    assert (turing.search, turing.model.dram_latency_us) == (hopper.search, hopper.model.dram_latency_us)
    assert turing.limits.registers_per_sm == hopper.limits.registers_per_sm
    assert (turing.limits.shared_per_sm, turing.model.sms) == (64 * 1024, 40)
    assert turing.features == {"mma_f16"}


@pytest.mark.parametrize("like", ["sm75", "sm42", ["sm90"], None])
def test_a_file_is_like_one_that_is_whole(like: Any, values: dict[str, Any], read: Callable[[Any], Arch]) -> None:
    read({"like": "sm90", "nvcc_arch": "sm_90"})
    with pytest.raises(
        UsageError, match=re.escape(f"sm90.yaml: like is {like!r}; expected an arch whose file is whole: ")
    ):
        read({**values, "like": like})


def test_an_arch_can_be_hashed_and_sent_to_another_process() -> None:
    arch = load_arch("sm90")
    assert pickle.loads(pickle.dumps(arch)) == arch
    assert hash(arch) == hash(load_arch("sm90"))


def test_an_unknown_arch_is_answered_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"^arch 'sm70' is not known; choose one of sm75, .*sm90, sm100"):
        load_arch("sm70")


@pytest.mark.parametrize("name", ["../arch/sm90", "", "sm90.yaml"])
def test_a_name_is_not_a_path(name: str) -> None:
    with pytest.raises(UsageError, match="is not known"):
        load_arch(name)


@pytest.mark.parametrize("key", [field.name for field in fields(Arch)])
def test_every_key_is_needed(key: str, values: dict[str, Any], read: Callable[[Any], Arch]) -> None:
    del values[key]
    with pytest.raises(UsageError, match=rf"^sm90\.yaml: {key} is missing; add it$"):
        read(values)


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        ("nvcc_arch", 7, "sm90.yaml: nvcc_arch is 7; expected a valid string"),
        ("nvcc_arch", "sm_80", "sm90.yaml: nvcc_arch is 'sm_80'; expected 'sm_90', as the file is called"),
        ("nvcc_arch", "sm_90, sm_100", "nvcc_arch is 'sm_90, sm_100'; expected 'sm_90', as the file is called"),
        ("vendor", "x", "sm90.yaml: vendor is not a known key; remove it"),
        ("limits", [1], "sm90.yaml: limits is [1]; expected an object"),
        ("limits.warps", 4, "sm90.yaml: limits.warps is not a known key; remove it"),
        ("limits.shared_per_sm", "228 KiB", "limits.shared_per_sm is '228 KiB'; expected a valid integer"),
        ("limits.blocks_per_sm", "32", "limits.blocks_per_sm is '32'; expected a valid integer"),
        ("limits.blocks_per_sm", True, "sm90.yaml: limits.blocks_per_sm is True; expected a valid integer"),
        ("limits.blocks_per_sm", 32.0, "sm90.yaml: limits.blocks_per_sm is 32.0; expected a valid integer"),
        (
            "limits.shared_reserved_per_block",
            -1,
            "shared_reserved_per_block is -1; expected greater than or equal to 0",
        ),
        ("limits.blocks_per_sm", 0, "sm90.yaml: limits.blocks_per_sm is 0; expected greater than 0"),
        ("model.launch_us", float("nan"), "sm90.yaml: model.launch_us is nan; expected a finite number"),
        ("model.launch_us", float("inf"), "sm90.yaml: model.launch_us is inf; expected a finite number"),
        ("model.launch_us", -1, "sm90.yaml: model.launch_us is -1; expected greater than 0"),
        ("model.sms", None, "sm90.yaml: model.sms is None; expected a valid integer"),
        ("features", ["tcgen05"], "sm90.yaml: features.0 is 'tcgen05'; expected 'mma_f16', 'mma_bf16', 'mma_tf32', "),
        ("features", "mma_f16", "sm90.yaml: features is 'mma_f16'; expected a valid array"),
        ("search.colour", ["red"], "sm90.yaml: knob 'colour' is not known; choose one of chunks, warps, cluster"),
        ("search.warps", [3], "sm90.yaml: knob warps = 3 is not searched on sm90; choose one of 1, 2, 4, 8, 16, 32"),
        ("search.warps", [[1]], "sm90.yaml: search.warps.0"),
        ("search.warps", [], "sm90.yaml: knob warps is left no value to search; give at least one of 1, 2, 4"),
        ("never_faster", [{"knobs": {"warps": [3]}, "why": "-"}], "sm90.yaml: knob warps = 3 is not searched on sm90"),
        ("never_faster", [{"knobs": {"colour": [3]}, "why": "-"}], "sm90.yaml: knob 'colour' is not known"),
        ("never_faster", [{"knobs": {}}], "sm90.yaml: never_faster.0.why is missing; add it"),
    ],
)
def test_a_wrong_value_is_named_with_what_was_expected(
    path: str, value: Any, sentence: str, values: dict[str, Any], read: Callable[[Any], Arch]
) -> None:
    *parents, key = path.split(".")
    inner = values
    for parent in parents:
        inner = inner[parent]
    inner[key] = value
    with pytest.raises(UsageError) as error:
        read(values)
    assert sentence in str(error.value)


def test_a_knob_that_a_file_does_not_name_has_all_its_values(read: Callable[[Any], Arch]) -> None:
    arch = read({"like": "sm90", "nvcc_arch": "sm_90", "search": {"load": ["plain"]}})
    assert arch.search == KNOB_VALUES | {"load": ("plain",), "min_blocks": load_arch("sm90").search["min_blocks"]}


def test_a_value_is_read_as_its_kind(values: dict[str, Any], read: Callable[[Any], Arch]) -> None:
    values["model"]["launch_us"] = 2
    values["search"]["warps"] = [8, 4, 4]
    values["nvcc_arch"] = "sm_90a"
    arch = read(values)
    assert (arch.model.launch_us, arch.search["warps"]) == (2, (4, 8))
    assert (arch.name, arch.compute_capability) == ("sm90", "9.0")


@pytest.mark.parametrize("text", ["name: [", "", "- a\n- b", "\t", "[" * 9000, "{" * 9000 + "}" * 9000])
def test_a_file_that_is_no_mapping_is_one_sentence(text: str, read: Callable[[Any], Arch]) -> None:
    with pytest.raises(UsageError, match=r"^sm90\.yaml[^\n]*$"):
        read(text)


def test_a_file_that_cannot_be_read_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        read_arch(tmp_path / "sm99.yaml")
