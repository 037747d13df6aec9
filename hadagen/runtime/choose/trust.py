"""The setting that insists on signatures. Where HADAGEN_TRUSTED_KEYS names public keys, calls use only bundles that one
of them signed."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from pathlib import Path

from hadagen.errors import StorageError, UsageError
from hadagen.owners import fault_of
from hadagen.tuning_db.bundle import Accept, accept_all
from hadagen.tuning_db.signatures import PublicKey, Signature, Statement, check_installed, public_keys

VARIABLE = "HADAGEN_TRUSTED_KEYS"


class UntrustedError(StorageError):
    """No trusted key signed a bundle."""


def setting() -> str | None:
    """The value of the variable; None if it is not set."""
    return os.environ.get(VARIABLE)


def trusted_keys() -> tuple[PublicKey, ...] | None:
    """The public keys that the variable names, separated as in PATH: files, or the keys themselves. None if it is not
    set; then any bundle is used.

    Read once for each value of the variable. Raises `StorageError` if a key cannot be read, if others could change the
    file of one, if no key is named, or without the package cryptography.
    """
    value = setting()
    return None if value is None else _keys(value)


def accepting(keys: Sequence[PublicKey] | None) -> Accept:
    """A check that accepts the bundles that one of the keys signed; all bundles if `keys` is None."""
    if keys is None:
        return accept_all
    by_text = {key.raw.hex(): key for key in keys}

    def accept(path: Path, statement: Statement, signatures: Sequence[Signature]) -> None:
        ours = [each for each in signatures if each.key in by_text]
        if any(each.is_of(statement) for each in ours):
            return
        if ours:
            raise StorageError(
                f"the signature of {path} by {ours[0].signer.fingerprint} is not of what it holds; get the file again "
                "from where it was signed"
            )
        by = f"signed by {', '.join(each.signer.fingerprint for each in signatures)}" if signatures else "not signed"
        or_add = f", or add its signer's key to {VARIABLE}" if signatures else ""
        raise UntrustedError(
            f"{path} is {by}, but {VARIABLE} accepts only {' or '.join(key.fingerprint for key in keys)}; "
            f"sign it with `hadagen bundle sign`{or_add}"
        )

    return accept


@functools.lru_cache(maxsize=4)
def _keys(value: str) -> tuple[PublicKey, ...]:
    check_installed()
    keys: list[PublicKey] = []
    for named in filter(None, value.split(os.pathsep)):
        if os.path.lexists(named) and (problem := fault_of(named)):
            raise StorageError(f"{VARIABLE} names a file that could be changed by others: {problem}")
        try:
            keys += public_keys(named)
        except UsageError as error:
            raise StorageError(f"{VARIABLE}: {error}") from None
    if not keys:
        raise StorageError(f"{VARIABLE} is set and names no key; name one, or unset it to use bundles of anybody")
    return tuple(dict.fromkeys(keys))
