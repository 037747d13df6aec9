"""`hadagen bundle`: winners made a bundle of, listed, shown, verified, exported, merged and signed."""

import errno
import gzip
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import BEST, raising, run, sentence, succeed, unfolded
from sample_bundle import change, remake, write_trials
from sample_store import recorded
from sample_trials import H100, make_trial, times
from signing_keys import make_key

from hadagen.cli import bench, between, options
from hadagen.problem.problem import DType, Problem
from hadagen.problem.trial import Environment, Outcome, Provenance
from hadagen.runtime.choose.bundles import VARIABLE, user_directory
from hadagen.tuning_db import table
from hadagen.tuning_db.bundle import Bundle
from hadagen.tuning_db.signatures import public_keys
from hadagen.tuning_db.store import Store

pytestmark = pytest.mark.usefixtures("machine")


GPU = H100.gpu


def test_list_shows_bundles_and_the_database(sample: Path, database: Path) -> None:
    found = json.loads(succeed("bundle", "list", "--db", database, "--json"))
    (bundle,) = found["bundles"]
    assert (bundle["path"], bundle["arch"], bundle["gpus"], bundle["winners"]) == (str(sample), "sm90", [GPU], 2)
    assert found["databases"] == [
        {
            "path": str(database),
            "read_only": False,
            "runs": [
                {"arch": "sm90", "gpu": GPU, "problems": 1, "trials": 2, "outcomes": {"ok": 1, "wrong_answer": 1}}
            ],
        }
    ]
    text = succeed("bundle", "list", "--db", database)
    assert text.splitlines()[0] == f"{sample.parent}:"
    assert "\nsample.db  sm90  H100 80GB " in text
    assert "1 ok, 1 wrong_answer" in text


def test_verify_names_what_calls_go_on_without(sample: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE)
    good, bad = (user_directory() / name for name in ("good.db", "bad.db"))
    good.parent.mkdir(parents=True)
    good.write_bytes(sample.read_bytes())
    bad.write_bytes(sample.read_bytes()[:20_000])
    result = run("bundle", "verify")
    assert (result.exit_code, result.stdout.splitlines()[0]) == (1, "1 of 2 bundles is sound")
    assert "\ngood.db  sm90 " in result.stdout
    assert f"hadagen: {bad} is damaged" in result.stderr
    found = run("bundle", "verify", "--json")
    report = json.loads(found.stdout)
    assert (found.exit_code, list(report["sound"])) == (1, [str(good)])
    (damage,) = report["damaged"]
    assert result.stderr == f"hadagen: {damage}\n"


def test_list_of_nothing_says_what_to_do() -> None:
    assert succeed("bundle", "list") == "no bundle; make one with: hadagen tune\n"
    assert json.loads(succeed("bundle", "list", "--json")) == {"bundles": [], "untrusted": [], "databases": []}


def test_a_bundle_is_made_found_verified_and_shown(database: Path) -> None:
    assert "2 winners, 1 kernels" in succeed("bundle", "make", "--db", database)
    assert succeed("bundle", "verify").startswith(f"1 bundle is sound\n{user_directory()}:\n")
    assert json.loads(succeed(*BEST, "256", "--inplace", "--json"))["match"] == "same-arch"
    (shown,) = json.loads(succeed("bundle", "show", "--json"))
    assert [entry["elements"] for entry in shown["entries"]] == [1 << 13, 1 << 23]
    assert shown["entries"][1]["us"] == 9.0
    assert "8388608" in succeed("bundle", "show", "--all")
    summary, _, table = succeed("bundle", "show").partition(f"\n\n{GPU}\n")
    expected = f"bundle {options.default_bundle('sm90')} arch sm90 GPUs {GPU} problems 1 winners 2 kernels 1 "
    assert unfolded(summary).startswith(expected)
    header, _, line = table.splitlines()
    assert header.split()[:5] == ["dtype", "numerics", "kind", "n", "winners"]
    assert line.split()[:6] == ["float16", "accurate", "contiguous", "256", "2", "1"]


def test_a_bundle_of_another_database_is_not_replaced(
    database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hadagen.tuner.search.tune", raising(AssertionError("it searched")))
    succeed("bundle", "make", "--db", database)
    before = options.default_bundle("sm90").read_bytes()
    other = recorded(
        tmp_path / "other.db",
        replace(make_trial(), problem=Problem.of(512, "float16")),
        replace(make_trial(), arch="sm80"),
        replace(make_trial(), outcome=Outcome.COMPILE_FAILED, kernel=None),
        make_trial(2, outcome=Outcome.WRONG_ANSWER),  # another kernel than that which won
    )
    refused = f"has winners that {other} has no working trial of, such as of n256-float16-accurate on {GPU}, and they"
    assert refused in sentence(run("bundle", "make", "--db", other), 2)
    tiny = ["tune", "--n", "512", "--dtype", "float16", "--numerics", "accurate", "--contiguous", "--trials", "1"]
    assert refused in sentence(run(*tiny, "--db", other), 2)
    assert options.default_bundle("sm90").read_bytes() == before
    with Store.open(database) as store:  # its own, by which the winner is wrong by now
        store.record(*(replace(trial, outcome=Outcome.WRONG_ANSWER) for trial in store.trials()))
        store.record(replace(make_trial(), problem=Problem.of(512, "float16")))
    succeed("bundle", "make", "--db", database)
    assert [problem.n for problem in Bundle.open(options.default_bundle("sm90")).problems()] == [512]


def test_a_bundle_of_estimates_is_replaced(database: Path) -> None:
    fields = {"provenance": Provenance.ESTIMATED, "environment": Environment()}
    path = write_trials(options.default_bundle("sm90"), [make_trial(problem=Problem.of(512, DType.FLOAT16), **fields)])
    succeed("bundle", "make", "--db", database)
    assert Bundle.open(path).gpus() == [GPU]


def test_a_line_of_a_bundle_has_the_mean_of_copy_and_the_largest_error(tmp_path: Path) -> None:
    """Of winners that differ in size."""
    fields = {"errors": {"normal": 1e-4}, "timings": times({1 << 20: 1.0})}
    path = write_trials(tmp_path / "x.db", [make_trial(timings=times({1 << 13: 4.0})), make_trial(2, **fields)])
    *_, header, more, line = succeed("bundle", "show", path).splitlines()
    assert header.split()[-6:] == ["n", "winners", "kernels", "of", "copy,", "largest"]
    assert more.split() == ["mean", "error"]
    assert line.split()[-5:] == ["256", "2", "2", "0.95", "0.0002"]
    said = succeed("bundle", "show", path, "--all")
    assert f"\n{GPU}, float16 accurate\nrows        n    winners" in said
    assert f"\n{GPU}, n256-float16-accurate\ndestination  elements" in said


def test_an_arch_names_the_bundle_that_is_shipped_for_it(
    sample: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless a file has this name, as in `hadagen report`."""
    monkeypatch.setattr(options, "shipped", lambda: {"sm90": sample})
    monkeypatch.chdir(tmp_path)
    digest = Bundle.open(sample).digest
    assert unfolded(succeed("bundle", "show", "sm90")).startswith(f"bundle {sample} arch sm90 ")
    assert json.loads(succeed("bundle", "verify", "sm90", "--json"))["sound"] == {str(sample): digest}
    succeed("bundle", "export", "sm90", "winners.csv")
    succeed("bundle", "merge", "sm90", "sm90")
    assert json.loads(succeed("bundle", "verify", "sm90", "--json"))["sound"].keys() == {"sm90"}
    for gpu in ("h100", "NVIDIA H200"):
        assert succeed("bundle", "show", gpu) == succeed("bundle", "show", sample)
    assert "no tuning database or bundle h100.db" in sentence(run("report", "h100.db"), 1)
    for absent in ("sm91", "h100.db", "of h100"):
        assert absent in sentence(run("bundle", "show", absent), 1)


def test_fewer_kernels_are_kept_the_more_may_be_lost(tmp_path: Path) -> None:
    trials = [make_trial(1, timings=times({1 << 13: 1.00, 1 << 20: 1.01}))]
    trials += [make_trial(2, timings=times({1 << 13: 1.01, 1 << 20: 1.00}))]
    make = ("bundle", "make", "--db", recorded(tmp_path / "trials.db", *trials), tmp_path / "x.db")
    assert "2 winners, 1 kernels" in succeed(*make)
    assert "2 winners, 2 kernels" in succeed(*make, "--loss", "0")
    for loss in ("-0.1", "1.5", "nan"):
        assert sentence(run(*make, "--loss", loss), 2) == f"--loss {loss} is not supported; give 0 to 1"


def test_the_winners_of_a_bundle_are_exported_and_merged(sample: Path, tmp_path: Path) -> None:
    succeed("bundle", "export", sample, tmp_path / "winners.csv")
    header, *lines = (tmp_path / "winners.csv").read_text().splitlines()
    assert header.startswith("gpu,problem,elements,destination,cache,us,")
    assert lines
    assert all(line.startswith(f"{GPU},n256-float16-accurate,") for line in lines)
    assert "cannot be written" in sentence(run("bundle", "export", sample, "/proc/winners.csv"), 1)
    said = sentence(run("bundle", "export", "--gpu", "Abacus", sample, tmp_path / "x"), 2)
    assert said.endswith(f"has no winner of Abacus; choose one of {GPU}")
    estimate = make_trial(provenance=Provenance.ESTIMATED, environment=Environment())
    estimated = write_trials(tmp_path / "estimated.db", [estimate])
    said = sentence(run("bundle", "export", "--gpu", GPU, estimated, tmp_path / "x"), 2)
    assert said.endswith(f"has no winner of {GPU}; leave out --gpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("csv.DictWriter.writerows", raising(OSError(errno.ENOSPC, "No space left on device")))
        assert "No space left" in sentence(run("bundle", "export", sample, tmp_path / "winners.csv"), 1)
    assert (tmp_path / "winners.csv").read_text().splitlines() == [header, *lines]
    (tmp_path / "empty.csv").touch()
    succeed("bundle", "export", sample, tmp_path / "empty.csv")
    assert (tmp_path / "empty.csv").read_text().splitlines() == [header, *lines]
    recording = tmp_path / "recording.jsonl.gz"
    recording.write_bytes(gzip.compress(b"what took an hour to measure"))
    (tmp_path / "notes.csv").write_text("n,time\n8,0.5\n")
    for other in (sample, recording, tmp_path / "notes.csv"):
        before = other.read_bytes()
        said = sentence(run("bundle", "export", sample, other), 1)
        assert f"{other} is there already and is not a table of hadagen; name another place" in said
        assert other.read_bytes() == before
    succeed("bundle", "merge", sample, sample, tmp_path / "both.db")
    succeed("bundle", "merge", sample, tmp_path / "both.db", tmp_path / "both.db")
    (tmp_path / "link.db").symlink_to("both.db")
    succeed("bundle", "merge", sample, tmp_path / "both.db", tmp_path / "link.db")
    said = sentence(run("bundle", "merge", sample, tmp_path / "both.db"), 2)
    assert f"{tmp_path / 'both.db'} is there already and would be lost" in said
    succeed("bundle", "export", tmp_path / "both.db", tmp_path / "again.csv")
    assert (tmp_path / "again.csv").read_text() == (tmp_path / "winners.csv").read_text()


def test_an_export_to_standard_output_is_the_table_and_no_more(
    sample: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    succeed("bundle", "export", sample, "winners.csv")
    before = sorted(tmp_path.iterdir())
    assert succeed("bundle", "export", sample, "-") == Path("winners.csv").read_text()
    assert sorted(tmp_path.iterdir()) == before
    said = sentence(run("bundle", "export", sample, "/dev/null"), 1)
    assert said == "/dev/null cannot be written (Not a regular file); name another place"


@pytest.mark.parametrize("columns", [bench.COLUMNS, between.COLUMNS, table.COLUMNS, table.ASSEMBLED])
def test_every_table_replaces_its_like(columns: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    table.write_table(path, columns, [dict.fromkeys(columns, 1)], {})
    table.check_table_place(path)


# ---- signatures ------------------------------------------------------------------------------------------------------
def test_a_bundle_is_signed_verified_and_listed(sample: Path, tmp_path: Path) -> None:
    (private, public), (_, other) = make_key(tmp_path), make_key(tmp_path, "other")
    (key,), (stranger,) = public_keys(str(public)), public_keys(str(other))
    digest = Bundle.open(sample).digest
    assert succeed("bundle", "verify", sample).startswith("1 bundle is sound\n")
    assert succeed("bundle", "verify", sample).endswith(f"  not signed\n    {digest}\n")
    assert digest not in succeed("bundle", "verify")
    assert digest in succeed("bundle", "verify", "--all")
    assert "  not signed\n" in succeed("bundle", "list")
    unsigned = sentence(run("bundle", "verify", sample, "--key", public), 1)
    assert unsigned == f"{sample} is not signed by {key.fingerprint}; get one that is"

    signed = f"{sample}: signed by {key.fingerprint}\npublic key: {key.text}\n"
    assert succeed("bundle", "sign", sample, "--key", private) == signed
    for named in ((), ("--key", public), ("--key", key.text)):
        said = succeed("bundle", "verify", sample, *named)
        assert said.endswith(f"  {key.fingerprint}\n    {digest}\n")
    found = json.loads(succeed("bundle", "verify", "--key", key.text, "--json"))
    assert found == {"sound": {str(sample): digest}, "signed": {str(sample): [key.fingerprint]}, "damaged": []}
    assert succeed("bundle", "list").splitlines()[-1].endswith(f"  {key.fingerprint}")
    (listed,) = json.loads(succeed("bundle", "list", "--json"))["bundles"]
    assert listed["signed"] == {key.fingerprint: True}
    said = sentence(run("bundle", "verify", sample, "--key", other), 1)
    assert said == f"{sample} is not signed by {stranger.fingerprint}; get one that is"

    succeed("bundle", "merge", sample, tmp_path / "merged.db")
    assert succeed("bundle", "verify", tmp_path / "merged.db").splitlines()[-2].endswith("not signed")


def test_a_signature_of_something_else_is_a_failure(sample: Path, tmp_path: Path) -> None:
    private, public = make_key(tmp_path)
    succeed("bundle", "sign", sample, "--key", private)
    change(sample, "UPDATE entries SET hot_us = hot_us + 1")
    remake(sample)
    (key,) = public_keys(str(public))
    for named in ((), ("--key", public)):
        said = sentence(run("bundle", "verify", sample, *named), 1)
        assert said == f"the signature of {sample} by {key.fingerprint} does not match its contents; sign it again"
    assert succeed("bundle", "list").splitlines()[-1].endswith(f"  {key.fingerprint} (wrong)")


def test_several_bundles_are_signed_at_once_and_what_cannot_be_is_a_sentence(sample: Path, tmp_path: Path) -> None:
    private, _ = make_key(tmp_path)
    copy = shutil.copy(sample, tmp_path / "copy.db")
    assert succeed("bundle", "sign", sample, copy, "--key", private).count(": signed by ") == 2
    assert "is not a hadagen bundle" in sentence(run("bundle", "sign", private, "--key", private), 1)
    private.chmod(0o644)
    assert f"run: chmod 600 {private}" in sentence(run("bundle", "sign", sample, "--key", private), 2)
    locked, _ = make_key(tmp_path, "locked", passphrase=b"sesame")
    said = sentence(run("bundle", "sign", sample, "--key", locked), 2)
    assert said == f"{locked} is protected by a passphrase, and there is no terminal to ask for it; sign in one"
    said = sentence(run("bundle", "sign", sample), 2)
    assert said.startswith("Missing option '--key'")
    assert "no public key" in sentence(run("bundle", "verify", sample, "--key", sample), 2)


def test_without_cryptography_signatures_are_named_but_not_checked(
    sample: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    private, public = make_key(tmp_path)
    succeed("bundle", "sign", sample, "--key", private)
    (key,) = public_keys(str(public))
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.asymmetric", None)
    said = succeed("bundle", "verify", sample)
    assert f" {key.fingerprint} (not checked, pip install '.[sign]' in a checkout of hadagen)" in unfolded(said)
    assert json.loads(succeed("bundle", "list", "--json"))["bundles"][0]["signed"] == {key.fingerprint: None}


def test_list_says_what_calls_leave_out(sample: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    private, public = make_key(tmp_path)
    monkeypatch.setenv("HADAGEN_TRUSTED_KEYS", str(public))
    (key,) = public_keys(str(public))
    said = sentence(run("bundle", "list"), 1)
    assert said.startswith(f"{sample} is not signed, but HADAGEN_TRUSTED_KEYS accepts only {key.fingerprint}; sign it")
    monkeypatch.delenv(VARIABLE)
    assert succeed("bundle", "list") == "no bundle; make one with: hadagen tune\n"
    found = user_directory() / "sm90.db"
    found.parent.mkdir(parents=True)
    shutil.copy(sample, found)
    monkeypatch.setenv("HADAGEN_TRUSTED_KEYS", str(public))
    listed = run("bundle", "list")
    fix = "none signed by your keys;\nsign them with hadagen bundle sign, or name their keys too"
    assert listed.stdout == f"1 bundle, {fix}\n"
    shutil.copy(sample, found.with_name("more.db"))
    assert run("bundle", "list").stdout == f"2 bundles, {fix}\n"
    found.with_name("broken.db").write_text("no bundle")
    assert json.loads(run("bundle", "list", "--json").stdout)["untrusted"] == [
        str(found.with_name(name)) for name in ("more.db", "sm90.db")
    ]
    succeed("bundle", "sign", found, "--key", private)
    listed = run("bundle", "list").stdout
    assert listed.startswith(f"1 bundle besides those that follow, {fix}\n")
    assert f"\n{found.parent}:\nbundle" in listed
    assert f"\n{found.name}  sm90 " in listed
