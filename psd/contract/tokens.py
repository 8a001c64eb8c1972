"""Bearer tokens: the files of shards and clients, and the metadata of calls.

A shard's file has a line `ROLE TOKEN` for each token; empty lines and lines that begin with # are ignored. A client's file
holds only its token. A token is 16 to 256 characters of A-Z a-z 0-9 . _ ~ + / = -, best random ones: `openssl rand -hex 32`.
psd/rim/access.py decides what each role may do. No message contains a token. Tokens are opaque, no JSON Web Tokens: these need
keys, clocks and a library to say what a line of a file says, and stay valid until they expire.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import re
from collections.abc import Iterable
from dataclasses import dataclass

from psd.contract.config import ConfigError
from psd.contract.watched import read_secret

METADATA_KEY = "authorization"
_SCHEME = "Bearer "

_ROLES = "worker, publisher, reader or admin"

TOKENS_MAX = 100
"""Limit of tokens in a shard's file. Each call's token is compared with all of them."""

_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]{16,256}")
_WHAT_IT_HAS = "16 to 256 characters of A-Z a-z 0-9 . _ ~ + / = -"


class Role(enum.Enum):
    """Roles of tokens."""

    WORKER = "worker"
    PUBLISHER = "publisher"
    READER = "reader"
    ADMIN = "admin"


@dataclass(frozen=True)
class Tokens:
    """A shard's tokens: the role of each, by the SHA-256 of the token."""

    roles: dict[bytes, Role]

    def role_of(self, digest: bytes) -> Role | None:
        """The role of the token with this digest, or None. The time does not depend on whether and where it is found."""
        found = None
        for known, role in self.roles.items():
            if hmac.compare_digest(known, digest):
                found = role
        return found

    def seal(self, words: bytes) -> bytes:
        """A proof that these words come from somebody who has the file: HMAC-SHA256, with a key that no reader can make."""
        key = hashlib.sha256(b"".join(sorted(known for known, role in self.roles.items() if role is not Role.READER)))
        return hmac.digest(key.digest(), words, "sha256")


def parse_tokens(text: str, where: str) -> Tokens:
    """Parse a shard's file.

    Raises:
        ConfigError: names `where` and the line, never the token.
    """
    roles: dict[bytes, Role] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2 or words[0] not in {role.value for role in Role}:
            raise ConfigError(f"{where}, line {number}: expected ROLE TOKEN, where ROLE is {_ROLES}")
        if not _TOKEN.fullmatch(words[1]):
            raise ConfigError(f"{where}, line {number}: a token has {_WHAT_IT_HAS}")
        digest = digest_of(words[1])
        if digest in roles:
            raise ConfigError(f"{where}, line {number}: this token is given twice")
        roles[digest] = Role(words[0])
        if len(roles) > TOKENS_MAX:
            raise ConfigError(f"{where}: has more than {TOKENS_MAX} tokens")
    if not roles:
        raise ConfigError(f"{where}: has no token, so nobody could do anything")
    return Tokens(roles)


def read_tokens(path: str) -> Tokens:
    """Read a shard's file; ConfigError as in `parse_tokens`, or if it cannot be read."""
    return parse_tokens(_text(path, "--token-file"), f"--token-file: {path}")


def parse_token(text: str, where: str) -> str:
    """Parse a client's file; ConfigError names `where`."""
    token = text.strip()
    if not _TOKEN.fullmatch(token):
        raise ConfigError(
            f"{where}: expected one token and nothing else, {_WHAT_IT_HAS}; lines with roles are for psd-server's --token-file"
        )
    return token


def read_token(path: str) -> str:
    """Read a client's file; ConfigError as in `parse_token`, or if it cannot be read."""
    return parse_token(_text(path, "token_file"), f"token_file: {path}")


def _text(path: str, what: str) -> str:
    try:
        return read_secret(path, what).decode("ascii")
    except UnicodeDecodeError:
        raise ConfigError(f"{what}: {path} is not ASCII text") from None


def digest_of(token: str) -> bytes:
    """The digest by which a token is stored and compared."""
    return hashlib.sha256(token.encode("utf-8", "replace")).digest()


def metadata_of(token: str) -> tuple[tuple[str, str], ...]:
    """A token as a call's metadata."""
    return ((METADATA_KEY, _SCHEME + token),)


def presented(metadata: Iterable[tuple[str, str | bytes]] | None) -> bytes | None:
    """The digest of the token in a call's metadata; None if there is not exactly one."""
    values = [value for key, value in metadata or () if key == METADATA_KEY]
    if len(values) != 1 or not isinstance(values[0], str) or values[0][: len(_SCHEME)].lower() != _SCHEME.lower():
        return None
    return digest_of(values[0][len(_SCHEME) :])
