"""`hadagen bundle sign`, and what `verify` and `list` say of signatures."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from command_line import run, sentence, succeed
from sample_bundle import change, remake
from signing_keys import make_key

from hadagen.runtime.bundles import VARIABLE, user_directory
from hadagen.tuning_db.bundle import Bundle
from hadagen.tuning_db.signatures import public_keys

pytestmark = pytest.mark.usefixtures("machine")


def test_a_bundle_is_signed_verified_and_listed(sample: Path, tmp_path: Path) -> None:
    (private, public), (_, other) = make_key(tmp_path), make_key(tmp_path, "other")
    (key,), (stranger,) = public_keys(str(public)), public_keys(str(other))
    digest = Bundle.open(sample).digest
    assert succeed("bundle", "verify", sample) == f"{sample}: sound, {digest}, not signed\n"
    assert succeed("bundle", "list").splitlines()[-1].endswith("  not signed")
    unsigned = sentence(run("bundle", "verify", sample, "--key", public), 1)
    assert unsigned == f"{sample} is not signed by {key.fingerprint}; get one that is"

    signed = f"{sample}: signed by {key.fingerprint}\npublic key: {key.text}\n"
    assert succeed("bundle", "sign", sample, "--key", private) == signed
    for named in ((), ("--key", public), ("--key", key.text)):
        said = succeed("bundle", "verify", sample, *named)
        assert said == f"{sample}: sound, {digest}, signed by {key.fingerprint}\n"
    found = json.loads(succeed("bundle", "verify", "--key", key.text, "--json"))
    assert found == {"sound": {str(sample): digest}, "signed": {str(sample): [key.fingerprint]}, "damaged": []}
    assert succeed("bundle", "list").splitlines()[-1].endswith(f"  {key.fingerprint}")
    (listed,) = json.loads(succeed("bundle", "list", "--json"))["bundles"]
    assert listed["signed"] == {key.fingerprint: True}
    said = sentence(run("bundle", "verify", sample, "--key", other), 1)
    assert said == f"{sample} is not signed by {stranger.fingerprint}; get one that is"

    succeed("bundle", "merge", sample, tmp_path / "merged.db")
    assert succeed("bundle", "verify", tmp_path / "merged.db").endswith("not signed\n")


def test_a_signature_of_something_else_is_a_failure(sample: Path, tmp_path: Path) -> None:
    private, public = make_key(tmp_path)
    succeed("bundle", "sign", sample, "--key", private)
    change(sample, "UPDATE entries SET hot_us = hot_us + 1")
    remake(sample)
    (key,) = public_keys(str(public))
    for named in ((), ("--key", public)):
        said = sentence(run("bundle", "verify", sample, *named), 1)
        assert said == f"the signature of {sample} by {key.fingerprint} is not of what it holds; sign it again"
    assert succeed("bundle", "list").splitlines()[-1].endswith(f"  {key.fingerprint} (wrong)")


def test_several_bundles_are_signed_at_once_and_what_cannot_be_is_a_sentence(sample: Path, tmp_path: Path) -> None:
    private, _ = make_key(tmp_path)
    copy = shutil.copy(sample, tmp_path / "copy.db")
    assert succeed("bundle", "sign", sample, copy, "--key", private).count(": signed by ") == 2
    said = sentence(run("bundle", "sign", tmp_path / "missing.db", "--key", private), 1)
    assert "missing.db cannot be read (No such file or directory)" in said
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
    assert said.endswith(f"signed by {key.fingerprint} (not checked, pip install 'hadagen[sign]')\n")
    assert json.loads(succeed("bundle", "list", "--json"))["bundles"][0]["signed"] == {key.fingerprint: None}
    for arguments in (("verify", sample, "--key", public), ("sign", sample, "--key", private)):
        said = sentence(run("bundle", *arguments), 1)
        assert said.endswith("is not installed; install it with: pip install 'hadagen[sign]'")


def test_list_says_what_calls_leave_out(sample: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    private, public = make_key(tmp_path)
    monkeypatch.setenv("HADAGEN_TRUSTED_KEYS", str(public))
    (key,) = public_keys(str(public))
    said = sentence(run("bundle", "list"), 1)
    assert said.startswith(f"{sample} is not signed, and HADAGEN_TRUSTED_KEYS asks for {key.fingerprint}; sign it")
    monkeypatch.delenv(VARIABLE)
    assert succeed("bundle", "list") == "no bundle; make one with: hadagen tune\n"
    found = user_directory() / "sm90.db"
    found.parent.mkdir(parents=True)
    shutil.copy(sample, found)
    monkeypatch.setenv("HADAGEN_TRUSTED_KEYS", str(public))
    listed = run("bundle", "list")
    fix = "none signed by your keys; sign them with hadagen bundle sign, or name their keys too"
    assert listed.stdout == f"1 bundle, {fix}\n"
    shutil.copy(sample, found.with_name("more.db"))
    assert run("bundle", "list").stdout == f"2 bundles, {fix}\n"
    assert json.loads(run("bundle", "list", "--json").stdout)["untrusted"] == [
        str(found.with_name(name)) for name in ("more.db", "sm90.db")
    ]
    succeed("bundle", "sign", found, "--key", private)
    listed = run("bundle", "list").stdout
    assert listed.startswith(f"1 bundle besides those that follow, {fix}\n")
    assert str(found) in listed
