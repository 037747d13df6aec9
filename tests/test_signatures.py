"""Signatures: what they cover, which keys make them, and calls that insist on one."""

import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519, rsa
from sample_bundle import change, hide_bundles, remake, write_sample
from sample_trials import PROBLEM
from signing_keys import make_key, no_passphrase, read_key

import hadagen
from hadagen.errors import StorageError, UsageError
from hadagen.runtime.choose import bundles, trust
from hadagen.runtime.choose.entries import Match
from hadagen.runtime.launch import autotune
from hadagen.tuning_db.bundle import FORMAT, MOST_SIGNATURES, SIGNED, Bundle
from hadagen.tuning_db.bundle_writer import sign_bundle
from hadagen.tuning_db.merge import merge_bundles
from hadagen.tuning_db.signatures import Signature, SigningKey, Statement, public_keys

FORMATS = Path(__file__).parent / "formats"


@pytest.fixture(autouse=True)
def nothing_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hide_bundles(tmp_path, monkeypatch)
    monkeypatch.delenv(trust.VARIABLE, raising=False)
    monkeypatch.setattr(bundles, "_warned", set())


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    return make_key(tmp_path)


@pytest.fixture
def signed(keys: tuple[Path, Path]) -> Path:
    """A bundle where calls look for it, and its signature."""
    path = write_sample(bundles.user_directory() / "sm90.db")
    sign_bundle(path, read_key(keys[0]))
    return path


def best() -> hadagen.BestConfig:
    return hadagen.best_config(PROBLEM, 1, arch="sm90", inplace=True)


def test_one_warning_names_all_that_no_trusted_key_signed(
    signed: Path, keys: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("sm80", "sm86", "sm100"):
        write_sample(signed.with_name(f"{name}.db"))
    monkeypatch.setenv(trust.VARIABLE, str(make_key(tmp_path, "other")[1]))
    with pytest.warns() as caught:
        found = [best().match for _ in range(2)]
    assert found == [Match.GENERIC] * 2
    (said,) = [str(each.message) for each in caught]
    assert said.startswith("hadagen goes on without 4 bundles that no trusted key signed, such as: ")
    assert len(bundles.untrusted()) == 4
    monkeypatch.setenv(trust.VARIABLE, str(keys[1]))
    with pytest.warns(RuntimeWarning, match="goes on without 3 bundles that no trusted key signed"):
        now = best()
    assert now.match is not Match.GENERIC
    assert signed not in bundles.untrusted()
    monkeypatch.delenv(trust.VARIABLE)
    assert not bundles.untrusted()


# ---- what is signed --------------------------------------------------------------------------------------------------
def test_a_signature_changes_nothing_else(tmp_path: Path, keys: tuple[Path, Path]) -> None:
    path = write_sample(tmp_path / "sm90.db")
    before, entries = Bundle.open(path), Bundle.open(path).entries(PROBLEM)
    path.chmod(0o640)
    signature = sign_bundle(path, read_key(keys[0]))
    after = Bundle.open(path)
    after.verify()
    assert (after.digest, after.entries(PROBLEM)) == (before.digest, entries)
    assert after.signatures == (signature,)
    assert signature.is_of(after.statement)
    assert [signature.signer] == public_keys(str(keys[1])) == public_keys(signature.signer.text)
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_signature_is_of_format_arch_and_content_of_a_bundle(tmp_path: Path) -> None:
    key = ed25519.Ed25519PrivateKey.generate()
    of_key = SigningKey(key)
    statement = Statement(FORMAT, "sm90", "ab" * 32)
    signature = of_key.sign(statement)
    assert signature.is_of(statement)
    for other in ({"format": FORMAT + 1}, {"arch": "sm100"}, {"digest": "ac" * 32}):
        assert not signature.is_of(replace(statement, **other))
    for plain in (statement.digest.encode(), bytes.fromhex(statement.digest)):
        assert not Signature(signature.key, key.sign(plain).hex()).is_of(statement)
    assert SigningKey(ed25519.Ed25519PrivateKey.generate()).sign(statement) != signature
    with pytest.raises(ValueError, match="another form"):
        Signature(signature.key, signature.signature.upper())


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE entries SET hot_us = hot_us + 1",
        "UPDATE environments SET gpu = 'NVIDIA H200'",
        "UPDATE meta SET value = 'sm80' WHERE key = 'arch'",
        f"PRAGMA user_version = {FORMAT - 1}",
    ],
)
def test_no_digest_makes_a_signature_fit_what_was_changed(signed: Path, statement: str) -> None:
    change(signed, statement)
    remake(signed)
    bundle = Bundle.open(signed)
    assert not any(each.is_of(bundle.statement) for each in bundle.signatures)


def test_several_keys_may_sign_and_each_once(signed: Path, tmp_path: Path, keys: tuple[Path, Path]) -> None:
    other = read_key(make_key(tmp_path, "other")[0])
    for key in (other, read_key(keys[0]), other):
        sign_bundle(signed, key)
    bundle = Bundle.open(signed)
    assert [each.signer for each in bundle.signatures] == [read_key(keys[0]).public, other.public]
    assert all(each.is_of(bundle.statement) for each in bundle.signatures)
    for _ in range(MOST_SIGNATURES - 2):
        sign_bundle(signed, SigningKey(ed25519.Ed25519PrivateKey.generate()))
    with pytest.raises(StorageError, match="has 16 signatures, which is the most"):
        sign_bundle(signed, SigningKey(ed25519.Ed25519PrivateKey.generate()))
    change(signed, "INSERT INTO signatures (key, signature) SELECT key, signature FROM signatures LIMIT 1")
    with pytest.raises(StorageError, match="too many signatures"):
        Bundle.open(signed)


@pytest.mark.parametrize("name", ["bundle_4.db", "bundle_5.db", "bundle_6.db"])
def test_a_former_format_is_signed_as_the_first_with_any(name: str, tmp_path: Path, keys: tuple[Path, Path]) -> None:
    path = Path(shutil.copy(FORMATS / name, tmp_path / "sm90.db"))
    if name != "bundle_6.db":
        with pytest.raises(StorageError, match="have no signatures; write it anew with `hadagen bundle merge`"):
            sign_bundle(path, read_key(keys[0]))
        assert path.read_bytes() == (FORMATS / name).read_bytes()
        return
    signature = sign_bundle(path, read_key(keys[0]))
    bundle = Bundle.open(path)
    bundle.verify()
    assert bundle.statement == replace(Bundle.open(FORMATS / name).statement, format=SIGNED)
    assert signature.is_of(bundle.statement)


def test_what_is_damaged_is_not_signed_and_what_is_written_anew_has_no_signature(
    signed: Path, tmp_path: Path, keys: tuple[Path, Path]
) -> None:
    merge_bundles([signed], tmp_path / "merged.db")
    assert Bundle.open(tmp_path / "merged.db").signatures == ()
    change(signed, "UPDATE blobs SET cubin = ptx")
    before = signed.read_bytes()
    with pytest.raises(StorageError, match="is damaged"):
        sign_bundle(signed, read_key(keys[0]))
    assert signed.read_bytes() == before


# ---- keys ------------------------------------------------------------------------------------------------------------
def test_a_private_key_that_others_may_read_is_refused(keys: tuple[Path, Path]) -> None:
    for mode in (0o640, 0o604, 0o620):
        keys[0].chmod(mode)
        with pytest.raises(UsageError, match=r"key\.pem is a private key that others may read; run: chmod 600 "):
            read_key(keys[0])


def test_a_passphrase_is_asked_for(tmp_path: Path) -> None:
    private, public = make_key(tmp_path, passphrase=b"open sesame")
    assert [SigningKey.read(private, lambda: "open sesame").public] == public_keys(str(public))
    for wrong in ("open barley", ""):
        with pytest.raises(UsageError, match="cannot be read with this passphrase; give the right one"):
            SigningKey.read(private, lambda wrong=wrong: wrong)


def test_what_is_no_private_key_is_refused(tmp_path: Path, keys: tuple[Path, Path]) -> None:
    other, _ = make_key(tmp_path, "rsa", key=rsa.generate_private_key(65537, 1024))
    keys[1].chmod(0o600)
    (tmp_path / "large").touch(0o600)
    (tmp_path / "large").write_bytes(bytes(1 << 17))
    for path, error, said in (
        (other, UsageError, "is a private key of another kind than Ed25519; make one with: openssl genpkey"),
        (keys[1], UsageError, "has no private key in PEM; make one with: openssl genpkey"),
        (tmp_path / "large", UsageError, "has more than 65536 bytes"),
        (tmp_path / "missing", StorageError, r"cannot be read \(No such file or directory\)"),
        (tmp_path, StorageError, r"cannot be read \(Is a directory\)"),
    ):
        with pytest.raises(error, match=said):
            SigningKey.read(path, no_passphrase)


def test_what_is_no_public_key_is_refused(tmp_path: Path, keys: tuple[Path, Path]) -> None:
    _, other = make_key(tmp_path, "rsa", key=rsa.generate_private_key(65537, 1024))
    line = public_keys(str(keys[1]))[0].text
    (tmp_path / "text").write_text("a text")
    for named, said in (
        (
            str(keys[0]),
            r"is a private key; name the public one, which this command prints: openssl pkey -in .* -pubout",
        ),
        (str(other), "is no public key of Ed25519"),
        (str(tmp_path / "text"), "has no public key in PEM"),
        (line[:-4], "is no public key of Ed25519"),
        (line + "x", "is no public key of Ed25519"),
    ):
        with pytest.raises(UsageError, match=said):
            public_keys(named)


# ---- calls that insist on a key --------------------------------------------------------------------------------------
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_calls_use_what_a_trusted_key_signed(
    signed: Path, keys: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of several keys, a file among others, or the key itself."""
    _, other = make_key(tmp_path, "other")
    (tmp_path / "both").write_text(other.read_text() + keys[1].read_text())
    line = public_keys(str(keys[1]))[0].text
    for value in (keys[1], tmp_path / "both", f"{other}:{keys[1]}", line, f"{line}:{other}"):
        monkeypatch.setenv(trust.VARIABLE, str(value))
        assert best().match is Match.SAME_ARCH
    monkeypatch.setenv(trust.VARIABLE, str(other))
    with pytest.warns(
        RuntimeWarning, match=r"goes on without a bundle: .*sm90\.db is signed by SHA256:.*, but HADAGEN"
    ):
        assert best().match is Match.GENERIC


def forge(path: Path) -> None:
    """The winner takes a second more, by a bundle of which all digests are right."""
    change(path, "UPDATE entries SET hot_us = hot_us + 1e6")
    remake(path)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (
            lambda path: change(path, "DELETE FROM signatures"),
            "is not signed, but HADAGEN_TRUSTED_KEYS accepts only SHA256:",
        ),
        (forge, "the signature of .* by SHA256:.* is not of what it holds"),
        (
            lambda path: change(path, "UPDATE signatures SET signature = replace(signature, '0', '1')"),
            "the signature of .* by SHA256:.* is not of what it holds",
        ),
    ],
)
def test_calls_leave_out_what_no_trusted_key_signed(
    signed: Path, keys: tuple[Path, Path], spoil: Callable[[Path], None], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(signed)
    assert best().match is Match.SAME_ARCH
    monkeypatch.setenv(trust.VARIABLE, str(keys[1]))
    with pytest.warns() as warned:
        found = [best().match for _ in range(2)]
    assert found == [Match.GENERIC] * 2
    (warning,) = warned
    with pytest.raises(StorageError, match=said):
        raise StorageError(str(warning.message))
    monkeypatch.setenv(bundles.VARIABLE, str(signed))
    with pytest.raises(StorageError, match=said):
        best()


def test_what_is_read_later_was_signed_too(
    signed: Path, keys: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the file was replaced since, by one with right digests: for winners, and for the code of a kernel."""
    monkeypatch.setenv(trust.VARIABLE, str(keys[1]))
    forged = Path(shutil.copy(signed, tmp_path / "forged.db"))
    forge(forged)
    digest = Bundle.open(forged).entries(PROBLEM)[0].kernel
    (bundle,) = bundles.known()
    signed.write_bytes(forged.read_bytes())
    for read in (lambda: bundle.entries(PROBLEM), lambda: bundle.kernel(digest), bundle.verify):
        with pytest.raises(StorageError, match="is not of what it holds"):
            read()


def test_a_part_that_was_changed_in_a_signed_file_is_noticed(
    signed: Path, keys: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the state of the file is as it was, as far as anybody can tell."""
    monkeypatch.setenv(trust.VARIABLE, str(keys[1]))
    (bundle,) = bundles.known()
    change(signed, "UPDATE entries SET hot_us = hot_us + 1")
    bundle._now.opened = bundle._now.opened._replace(state=Bundle.open(signed).state)
    with pytest.raises(StorageError, match="do not match their SHA-256"):
        bundle.entries(PROBLEM)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("", "HADAGEN_TRUSTED_KEYS is set and names no key; name one, or unset it"),
        (":", "HADAGEN_TRUSTED_KEYS is set and names no key"),
        ("{private}", "HADAGEN_TRUSTED_KEYS: .* is a private key; name the public one"),
        ("{public}:/missing", r"/missing cannot be read \(No such file or directory\); name a file with a key"),
    ],
)
def test_a_setting_that_names_no_keys_is_an_error(
    signed: Path, keys: tuple[Path, Path], value: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(trust.VARIABLE, value.format(private=keys[0], public=keys[1]))
    with pytest.raises(StorageError, match=said):
        best()


def test_a_file_of_keys_that_others_could_change_is_an_error(
    signed: Path, keys: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(trust.VARIABLE, str(keys[1]))
    keys[1].chmod(0o666)
    with pytest.raises(StorageError, match=r"others can write to .*key\.pub; run: chmod go-w .*key\.pub"):
        best()


def test_without_cryptography_there_is_a_sentence_where_it_is_needed(
    signed: Path, keys: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "cryptography"]:
        monkeypatch.setitem(sys.modules, name, None)
    assert best().match is Match.SAME_ARCH
    said = r"cryptography, .* is not installed; install it with: pip install '\.\[sign\]' in a checkout of hadagen"
    with pytest.raises(StorageError, match=said):
        read_key(keys[0])
    monkeypatch.setenv(trust.VARIABLE, str(keys[1]))
    with pytest.raises(StorageError, match=said):
        best()


def test_nothing_is_measured_that_calls_would_leave_out(
    keys: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = autotune.bundle_path("sm90")
    autotune._check_use(path)
    monkeypatch.setenv(trust.VARIABLE, str(keys[1]))
    with pytest.raises(StorageError, match="nobody signs what autotune writes"):
        autotune._check_use(path)
