"""Arch files: the shipped ones load, and each mistake in one is answered with a sentence that says what to correct."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from hadagen.arch import Arch, Limits, load_arch, read_arch
from hadagen.errors import UsageError
from hadagen.target import ARCH_DIRECTORY, known_archs


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


@pytest.mark.parametrize("name", known_archs())
def test_every_shipped_file_loads(name: str) -> None:
    arch = load_arch(name)
    assert arch.name == name
    assert max(arch.search["warps"]) * 32 <= arch.limits.threads_per_block
    assert max(arch.search["cluster"]) <= arch.limits.cluster_blocks


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
    assert arch.features == {"mma", "cp_async", "bulk_copy", "cluster", "dependent_launch"}


def test_an_arch_can_be_hashed_and_sent_to_another_process() -> None:
    arch = load_arch("sm90")
    assert pickle.loads(pickle.dumps(arch)) == arch
    assert hash(arch) == hash(load_arch("sm90"))


def test_an_unknown_arch_is_answered_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"^arch 'sm75' is not known; choose one of .*sm90"):
        load_arch("sm75")


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
        ("limits.blocks_per_sm", 0, "sm90.yaml: limits.blocks_per_sm is 0; expected greater than 0"),
        ("model.launch_us", float("nan"), "sm90.yaml: model.launch_us is nan; expected a finite number"),
        ("model.launch_us", float("inf"), "sm90.yaml: model.launch_us is inf; expected a finite number"),
        ("model.launch_us", -1, "sm90.yaml: model.launch_us is -1; expected greater than 0"),
        ("model.sms", None, "sm90.yaml: model.sms is None; expected a valid integer"),
        ("features", ["wgmma"], "features.0 is 'wgmma'; expected 'mma', 'cp_async', 'bulk_copy', 'cluster' or 'dep"),
        ("features", "mma", "sm90.yaml: features is 'mma'; expected a valid array"),
        ("search.colour", ["red"], "sm90.yaml: knob 'colour' is not known; choose from chunks, warps, cluster"),
        ("search.warps", [3], "sm90.yaml: knob warps = 3 is not searched on sm90; choose one of 1, 2, 4, 8, 16, 32"),
        ("search.warps", [[1]], "sm90.yaml: search.warps.0"),
        ("search.warps", [], "sm90.yaml: knob warps is left no value to search; give at least one of 1, 2, 4"),
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


def test_a_missing_knob_is_named(values: dict[str, Any], read: Callable[[Any], Arch]) -> None:
    del values["search"]["load"]
    with pytest.raises(UsageError, match=r"search\.load is missing"):
        read(values)


def test_a_value_is_read_as_its_kind(values: dict[str, Any], read: Callable[[Any], Arch]) -> None:
    values["model"]["launch_us"] = 2
    values["search"]["warps"] = [8, 4, 4]
    values["nvcc_arch"] = "sm_90a"
    arch = read(values)
    assert arch.model.launch_us == 2
    assert arch.search["warps"] == (4, 8)
    assert (arch.name, arch.compute_capability) == ("sm90", "9.0")


@pytest.mark.parametrize("text", ["name: [", "", "- a\n- b", "\t", "[" * 9000, "{" * 9000 + "}" * 9000])
def test_a_file_that_is_no_mapping_is_one_sentence(text: str, read: Callable[[Any], Arch]) -> None:
    with pytest.raises(UsageError, match=r"^sm90\.yaml[^\n]*$"):
        read(text)


def test_a_file_that_cannot_be_read_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        read_arch(tmp_path / "sm99.yaml")
