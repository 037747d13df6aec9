"""Signatures of bundles: Ed25519, by the package cryptography, which is imported only where one is made or checked.

A signature is of a statement: a format, an arch, and a content digest. The content digest covers the digests of all
parts of a bundle, so what is read later is signed too. The text that is signed begins with what it is for, so that a
signature of anything else by the same key does not serve here.

Keys are read from PEM files, as `openssl genpkey -algorithm ed25519` and `openssl pkey -pubout` write them.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hadagen.errors import StorageError, UsageError, install

# The DER of a public key of Ed25519 begins so, and 32 bytes follow: https://www.rfc-editor.org/rfc/rfc8410#section-4
_SPKI = bytes.fromhex("302a300506032b6570032100")
_SPKI_TEXT = base64.b64encode(_SPKI)[:16].decode()  # how it begins as text
_MOST_BYTES = 1 << 16  # of a file with keys
_PEM = re.compile(r"-----BEGIN ([A-Z0-9 ]+)-----(.*?)-----END \1-----", re.DOTALL)
_MAKE = "make one with: openssl genpkey -algorithm ed25519 -out KEY"


@dataclass(frozen=True)
class Statement:
    """The statement that a signature signs: the format of a bundle, its arch, and its content digest."""

    format: int
    arch: str
    digest: str

    @property
    def text(self) -> bytes:
        """The bytes that are signed."""
        return f"hadagen bundle signature 1\nformat {self.format}\narch {self.arch}\ndigest {self.digest}\n".encode()


@dataclass(frozen=True)
class PublicKey:
    """A public key of Ed25519: 32 bytes."""

    raw: bytes

    @property
    def fingerprint(self) -> str:
        """Its SHA-256, written as OpenSSH does."""
        return "SHA256:" + base64.b64encode(hashlib.sha256(self.raw).digest()).decode().rstrip("=")

    @property
    def text(self) -> str:
        """The line of its PEM file, which `public_keys` reads too."""
        return base64.b64encode(_SPKI + self.raw).decode()


@dataclass(frozen=True)
class Signature:
    """A signature as a bundle has it, unchecked: the public key and the signature, in hexadecimal digits.

    Raises `ValueError` if a field has other characters, or another length.
    """

    key: str
    signature: str

    def __post_init__(self) -> None:
        if not (re.fullmatch("[0-9a-f]{64}", self.key) and re.fullmatch("[0-9a-f]{128}", self.signature)):
            raise ValueError("a signature has another form")

    @property
    def signer(self) -> PublicKey:
        """The key that it names."""
        return PublicKey(bytes.fromhex(self.key))

    def is_of(self, statement: Statement) -> bool:
        """Whether this is a valid signature of `statement` by the key that it names. Raises `StorageError` without
        cryptography."""
        ed25519 = _ed25519()
        from cryptography.exceptions import InvalidSignature

        try:
            key = ed25519.Ed25519PublicKey.from_public_bytes(self.signer.raw)
            key.verify(bytes.fromhex(self.signature), statement.text)
        except (InvalidSignature, ValueError):
            return False
        return True


class SigningKey:
    """A private key."""

    def __init__(self, key: Any) -> None:
        from cryptography.hazmat.primitives import serialization as forms

        self._key = key
        self.public = PublicKey(key.public_key().public_bytes(forms.Encoding.Raw, forms.PublicFormat.Raw))

    @classmethod
    def read(cls, path: str | os.PathLike[str], ask: Callable[[], str]) -> SigningKey:
        """Read a PEM file.

        ask: returns the passphrase, and is called only if the key is protected by one.

        Raises `UsageError` if there is no private key of Ed25519, if others may read the file, or if the passphrase is
        wrong. Raises `StorageError` if the file cannot be read, or without cryptography.
        """
        ed25519 = _ed25519()
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        content, found = _read(path)
        if hasattr(os, "geteuid") and stat.S_ISREG(found.st_mode) and found.st_mode & 0o077:
            raise UsageError(f"{path} is a private key that others may read; run: chmod 600 {path}")
        passphrase = None
        if b"ENCRYPTED" in content:
            passphrase = ask().encode() or b"\0"  # an empty one is wrong, too, and no reason for a traceback
        try:
            key = load_pem_private_key(content, passphrase)
        except (ValueError, TypeError, UnsupportedAlgorithm):
            what = "cannot be read with this passphrase" if passphrase else "has no private key in PEM"
            fix = "give the right one" if passphrase else _MAKE
            raise UsageError(f"{path} {what}; {fix}") from None
        if not isinstance(key, ed25519.Ed25519PrivateKey):
            raise UsageError(f"{path} is a private key of another kind than Ed25519; {_MAKE}")
        return cls(key)

    def sign(self, statement: Statement) -> Signature:
        return Signature(self.public.raw.hex(), self._key.sign(statement.text).hex())


def public_keys(named: str) -> list[PublicKey]:
    """The public keys that a text names: the path of a PEM file with one or more, or the base64 line of such a file.

    Raises `UsageError` if there is none, and `StorageError` if the file cannot be read.
    """
    if named.startswith(_SPKI_TEXT):
        return [_public_key(named, named)]
    content, _ = _read(named)
    blocks = _PEM.findall(content.decode("latin-1"))
    if any("PRIVATE" in label for label, _ in blocks):
        public = f"openssl pkey -in {named} -pubout"
        raise UsageError(f"{named} is a private key; name the public one, which this command prints: {public}")
    keys = [_public_key(named, "".join(body.split())) for label, body in blocks if label == "PUBLIC KEY"]
    if not keys:
        raise UsageError(f"{named} has no public key in PEM; write one with: openssl pkey -in KEY -pubout -out {named}")
    return keys


def _public_key(named: str, text: str) -> PublicKey:
    try:
        found = base64.b64decode(text, validate=True)
    except binascii.Error:
        found = b""
    if not (found.startswith(_SPKI) and len(found) == len(_SPKI) + 32):
        raise UsageError(f"{named} is no public key of Ed25519; write one with: openssl pkey -in KEY -pubout")
    return PublicKey(found[len(_SPKI) :])


def _read(path: str | os.PathLike[str]) -> tuple[bytes, os.stat_result]:
    """The content of a small file, which may be a pipe, and the state of the file that was opened."""
    try:
        with Path(path).open("rb") as file:
            content, found = file.read(_MOST_BYTES + 1), os.fstat(file.fileno())
    except OSError as error:
        raise StorageError(f"{path} cannot be read ({error.strerror}); name a file with a key") from error
    if len(content) > _MOST_BYTES:
        raise UsageError(f"{path} has more than {_MOST_BYTES} bytes; name a file with a key")
    return content, found


def check_installed() -> None:
    """Raises `StorageError` if the package cryptography is missing."""
    _ed25519()


def _ed25519() -> Any:
    """The module of cryptography. Raises `StorageError` where it is missing."""
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise StorageError(
            "the Python package cryptography, which makes and checks signatures, is not installed; "
            f"install it with: {install('sign')}"
        ) from None
    return ed25519
