"""Places of files, paths or URLs, as people may see them: without the passwords, tokens and keys that URLs can hold.

    sftp://anna:tea@host/run           is shown as   sftp://host/run
    abfs://box/run?sig=abc             is shown as   abfs://box/run?***

Whoever puts a URL into a message, a log, a manifest or a list of arguments shows it by `shown`; what others say about a place,
such as the errors of a package that dials it, goes through `cleared` first. Must not know what is at these places.
"""

from __future__ import annotations

import re
from urllib.parse import quote, unquote

HIDDEN = "***"

SECRET_LETTERS_MIN = 4
"""Length from which a secret is looked for in texts; a shorter one is no secret, and may be part of any word."""

_USER = re.compile(r"(?<=://)[^/?#\s'\"]*@")
_QUERY = re.compile(r"(://[^\s'\"?]*)\?[^\s'\"]*")


def shown(url: str) -> str:
    """A place without secrets; a path is shown as it is."""
    return _QUERY.sub(rf"\1?{HIDDEN}", _USER.sub("", url))


def has_secret(url: str) -> bool:
    """True for a URL that is to be shown in another way than it is, and handed on where nobody sees it."""
    return shown(url) != url


def cleared(text: str, *urls: str) -> str:
    """A text without the secrets of any URL in it, and without those of the URLs given, however they are quoted."""
    for secret in sorted({secret for url in urls for secret in _secrets(url)}, key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    return shown(text)


def cause(error: BaseException, *urls: str) -> BaseException | None:
    """The error, as the cause of one that is raised in its place; None if it, or what led to it, quotes a secret, which a
    traceback would print."""
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
