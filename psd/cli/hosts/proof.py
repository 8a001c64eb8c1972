"""Proofs by which the psd-runs of one job show each other, over an open network, that they have the same --token-file.

    node   -> leader   join
    leader -> node     nonce
    node   -> leader   hello, with a nonce of its own, and HMAC-SHA256(key, "node", both nonces)
    leader -> node     welcome, with HMAC-SHA256(key, "leader", both nonces)

The key is made from all tokens in the file, so that a single worker's token is not enough. No token crosses the network, and no
proof can be used again. The node shows its proof first, so a stranger who connects learns nothing from which tokens could be
guessed.

Knows tokens, but no connections.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

from psd.contract.tokens import read_tokens

NONCE_BYTES = 16


def key_of(token_file: str) -> bytes:
    """The key of all hosts that have this file, in any order of its lines; empty without a file.

    Raises:
        ConfigError: as `read_tokens`.
    """
    if not token_file:
        return b""
    lines = sorted(digest + role.value.encode() for digest, role in read_tokens(token_file).roles.items())
    return hashlib.sha256(b"psd-run\0" + b"\0".join(lines)).digest()


def new_nonce() -> str:
    """A random number that has not been used before."""
    return secrets.token_hex(NONCE_BYTES)


def proof_of(key: bytes, who: str, leaders_nonce: str, nodes_nonce: str) -> str:
    """The proof that `who` ("node" or "leader") has the key; empty without a key."""
    if not key:
        return ""
    return hmac.digest(key, "\0".join((who, leaders_nonce, nodes_nonce)).encode(), "sha256").hex()


def what_is_wrong(expected: str, given: str) -> str:
    """The reason why the other side's proof is wrong; empty if it is right."""
    if hmac.compare_digest(expected.encode(), given.encode()):
        return ""
    if not expected:
        return "it has a --token-file, and the other side has none; give it to all hosts or to none"
    return "its --token-file has other tokens" if given else "it has no --token-file; all hosts must have the same tokens"
