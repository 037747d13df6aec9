"""Keys for the tests of signatures, in PEM files as openssl writes them."""

from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ed25519
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from hadagen.tuning_db.signatures import SigningKey


def make_key(folder: Path, name: str = "key", passphrase: bytes = b"", key: Any = None) -> tuple[Path, Path]:
    """The private and the public file of a new key, or of one that is given."""
    key = key or ed25519.Ed25519PrivateKey.generate()
    private, public = folder / f"{name}.pem", folder / f"{name}.pub"
    protection = BestAvailableEncryption(passphrase) if passphrase else NoEncryption()
    private.touch(mode=0o600)
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, protection))
    public.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return private, public


def no_passphrase() -> str:
    raise AssertionError("it asked for a passphrase")


def read_key(private: Path) -> SigningKey:
    return SigningKey.read(private, no_passphrase)
