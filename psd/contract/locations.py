"""Paths and URLs of files, as people may see them: without the passwords, tokens and keys that URLs can hold.

    sftp://anna:tea@host/run           is shown as   sftp://host/run
    abfs://box/run?sig=abc             is shown as   abfs://box/run?***

A URL in a message, a log, a manifest or a list of arguments must go through `shown`; the texts of others about it, such as the
errors of a package that connects to it, through `cleared`. Must not know what is stored there.
"""

from __future__ import annotations

import re
from urllib.parse import quote, unquote

HIDDEN = "***"

SECRET_LETTERS_MIN = 4
"""Length from which a secret is looked for in texts; a shorter one protects nothing, and may be part of any word."""

_USER = re.compile(r"(?<=://)[^/?#\s'\"]*@")
_QUERY = re.compile(r"(://[^\s'\"?]*)\?[^\s'\"]*")


def shown(url: str) -> str:
    """A URL without its secrets; a path unchanged."""
    return _QUERY.sub(rf"\1?{HIDDEN}", _USER.sub("", url))


def has_secret(url: str) -> bool:
    """True for a URL with a secret: `shown` changes it, and it must be passed on where nobody sees it."""
    return shown(url) != url


def cleared(text: str, *urls: str) -> str:
    """A text without the secrets of the URLs in it and of the given URLs, however these are quoted."""
    for secret in sorted({secret for url in urls for secret in _secrets(url)}, key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    return shown(text)


def cause(error: BaseException, *urls: str) -> BaseException | None:
    """The error, to be the cause of the one that replaces it. None if it or its own causes quote a secret, which a traceback
    would print."""
    link: BaseException | None = error
    while link is not None:
        said = f"{link} {link!r}"
        if cleared(said, *urls) != said:
            return None
        link = link.__cause__ or link.__context__
    return error


def _secrets(url: str) -> set[str]:
    found = {user[:-1].partition(":")[2] for user in _USER.findall(url)}
    for query in _QUERY.finditer(url):
        found |= {part.partition("=")[2] for part in re.split("[&;]", query[0].partition("?")[2])}
    found |= {unquote(secret) for secret in found}
    found |= {quote(secret, safe="") for secret in found} | {repr(secret)[1:-1] for secret in found}
    return {secret for secret in found if len(secret) >= SECRET_LETTERS_MIN}
