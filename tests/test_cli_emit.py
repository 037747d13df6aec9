"""`hadagen space` and `hadagen emit`: which choices of knobs are legal, and the source of one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import machine, run, sample, sentence, succeed
from sample_bundle import write_sample

from hadagen import toolchain

__all__ = ["machine", "sample"]  # fixtures
pytestmark = pytest.mark.usefixtures("machine")


def test_space_accounts_for_every_choice() -> None:
    report = json.loads(succeed("space", "--n", "4096", "--json"))
    assert report["legal"] > 100
    assert report["legal"] + sum(report["reasons"].values()) == report["total"]
    assert f"{report['legal']:,} of {report['total']:,} choices are legal" in succeed("space", "--n", "4096")


def test_emit_prints_source_that_says_its_plan() -> None:
    source = succeed("emit", "--n", "64", "--dtype", "bfloat16")
    assert "over rows of n = 64, bfloat16, accurate" in source
    assert source == succeed("emit", "--n", "64", "--dtype", "bfloat16")


def test_emit_sets_the_knobs_it_is_given_and_completes_the_others() -> None:
    source = succeed(
        "emit", "--n", "4096", "--numerics", "fast", "--knobs", "chunks=8", "--knobs", "cluster=2,stages=1"
    )
    assert "constexpr int chunks = 8, vectors = 8;" in source
    assert "__cluster_dims__(2, 1, 1)" in source


def test_emit_changes_others_where_what_it_is_given_calls_for_it() -> None:
    given = ("emit", "--n", "8192", "--dtype", "bfloat16", "--knobs")
    assert "constexpr int chunks = 2, vectors = 2;" in succeed(*given, "chunks=2")
    assert "the tile is shorter than a row" in sentence(run(*given, "chunks=1,warps=1,cluster=1"), 2)


def test_emit_starts_from_the_known_winner(sample: Path) -> None:
    write_sample(sample, chunks=2)
    assert "constexpr int chunks = 2, vectors = 2;" in succeed("emit", "--n", "256")


def test_emit_prints_ptx() -> None:
    assert ".target sm_90" in succeed("emit", "--n", "2", "--numerics", "fast", "--ptx")


def test_emit_prints_machine_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "disassemble", lambda kernel: f"code of {len(kernel.cubin)} bytes")
    assert succeed("emit", "--n", "2", "--numerics", "fast", "--sass").startswith("code of ")
