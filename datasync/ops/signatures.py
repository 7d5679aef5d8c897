"""Signatures of an index: proof of who wrote a dataset that the store itself cannot forge.

    _datasync/signatures/<sha256 of the index>.json    {"algorithm": "ed25519", "key": …, "signature": …}

The index names every shard with its digest, so whoever trusts the index trusts the data. A signature lies
beside the index under the digest of what it signs, and is written before the index is: a reader that sees
an index finds its signature. Keys are PEM files: PKCS#8 for the private one, SubjectPublicKeyInfo for the
public.
"""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

from datasync.errors import CorruptError, NotFoundError, UsageError
from datasync.replicate.layout import INDEX, signature_key
from datasync.replicate.retry import retrying
from datasync.storage.base import Store

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

_CONTEXT = b"datasync index v1\n"


def make_keys(private: Path, public: Path) -> None:
    """Write a new pair of keys; the private one is readable by its owner only.

    Raises:
        UsageError: One of the files exists.
    """
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    for path in (private, public):
        if path.exists():
            raise UsageError(f"{path} exists already", mend="choose another name; a key is never overwritten")
    key = Ed25519PrivateKey.generate()
    private.touch(mode=0o600)
    private.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    public.write_bytes(
        key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    )


def sign(store: Store, private: Path) -> str:
    """Sign the index at `store`; returns the key of the signature."""
    index = retrying(lambda: store.read(INDEX))
    key = _private(private)
    digest = hashlib.sha256(index).hexdigest()
    document = {
        "algorithm": "ed25519",
        "key": _fingerprint(key.public_key()),
        "signature": base64.b64encode(key.sign(_message(digest))).decode(),
    }
    store.write(signature_key(digest), json.dumps(document, indent=1).encode() + b"\n")
    return signature_key(digest)


def check_signature(store: Store, index: bytes | None, public: str | Path) -> tuple[str, bytes]:
    """Prove that `index`, read from `store`, was signed by the owner of a key.

    Returns:
        tuple[str, bytes]: Where the signature lies and what it is, to be copied with the index.

    Raises:
        CorruptError: There is no signature, or not by that key, or not of this index.
        UsageError: The key file cannot be used.
    """
    return check_digest(store, None if index is None else hashlib.sha256(index).hexdigest(), public)


def check_digest(store: Store, index_sha256: str | None, public: str | Path) -> tuple[str, bytes]:
    """Prove that the index with a digest was signed by the owner of a key; as `check_signature`."""
    if index_sha256 is None:
        raise CorruptError(
            f"{store.url} has no index, so nothing that could be signed", mend="sign a dataset"
        )
    where = signature_key(index_sha256)
    try:
        raw = retrying(lambda: store.read(where))
    except NotFoundError:
        raise CorruptError(
            f"the index at {store.url} is not signed, and {public} must have signed it",
            mend="find out who wrote it; if it is right, sign it (datasync sign)",
        ) from None
    _prove(raw, index_sha256, public, where=store.url)
    return where, raw


def prove(signature: bytes, index: bytes, public: str | Path, *, where: str) -> None:
    """Prove that `signature` is of `index` and by the owner of a key.

    Raises:
        CorruptError: It is not.
        UsageError: The key file cannot be used.
    """
    _prove(signature, hashlib.sha256(index).hexdigest(), public, where=where)


def _prove(signature: bytes, index_sha256: str, public: str | Path, *, where: str) -> None:
    from cryptography.exceptions import InvalidSignature

    key = _public(Path(public))
    try:
        document = json.loads(signature)
        signed = base64.b64decode(document["signature"], validate=True)
        key.verify(signed, _message(index_sha256))
    except (InvalidSignature, ValueError, KeyError, TypeError):
        raise CorruptError(
            f"the signature of the index at {where} is not by {public}",
            mend="do not use this dataset before you know who wrote it",
        ) from None


def _message(digest: str) -> bytes:
    return _CONTEXT + digest.encode()


def _fingerprint(key: Ed25519PublicKey) -> str:
    return hashlib.sha256(key.public_bytes_raw()).hexdigest()[:32]


def _private(path: Path) -> Ed25519PrivateKey:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    try:
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(
            f"{path} is no private key: {error}", mend="make one: datasync sign --new-key NAME"
        ) from error
    if not isinstance(key, Ed25519PrivateKey):
        raise UsageError(f"{path} is no ed25519 key", mend="make one: datasync sign --new-key NAME")
    return key


def _public(path: Path) -> Ed25519PublicKey:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        key = serialization.load_pem_public_key(path.read_bytes())
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(
            f"{path} is no public key: {error}", mend="give the .pub.pem that belongs to the key"
        ) from error
    if not isinstance(key, Ed25519PublicKey):
        raise UsageError(f"{path} is no ed25519 key", mend="give the .pub.pem that belongs to the key")
    return key
