"""Access to the dashboard: on loopback for everybody on this machine; on other addresses for those who have the token.

A browser sends the token once, in the body of a request, and gets a cookie for it; so the token is in no URL, and in no log. On
loopback the request must name a loopback host. Otherwise another site, whose name was made to point here, could read with the
user's browser what that may see. Must not know the pages.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from urllib.parse import urlsplit

from psd.contract.tokens import digest_of

VISITORS_MAX = 1000
VISIT_S = 7 * 24 * 3600.0
"""Seconds for which a cookie is valid."""

REFUSAL_S = 1.0
"""Seconds that an answer to a wrong token takes,"""
REFUSALS_MAX = 8
"""and how many wait at a time."""


def is_loopback(host: str) -> bool:
    """True if a name or address is a loopback one, which no other machine can reach."""
    if host in ("localhost", "localhost."):
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class TooManyTries(Exception):
    """Raised while too many wrong tokens are being answered."""


class Doorkeeper:
    """Decides who is let in.

    Args:
        token: the token to ask for; None: everybody who uses a loopback name is let in.
    """

    def __init__(self, token: str | None, now: Callable[[], float] = time.monotonic) -> None:
        self._digest = None if token is None else digest_of(token)
        self._now = now
        self._visits: OrderedDict[bytes, float] = OrderedDict()
        self._refusing = 0

    @property
    def asks(self) -> bool:
        """True if a token is asked for."""
        return self._digest is not None

    def is_known_host(self, host: str) -> bool:
        """True if a request may name this host, with or without a port."""
        try:
            return self.asks or is_loopback(urlsplit(f"//{host}").hostname or "")
        except ValueError:  # brackets that do not close, say
            return False

    def is_admitted(self, cookie: str | None) -> bool:
        """True if a request with this cookie may see the job."""
        if not self.asks:
            return True
        until = self._visits.get(digest_of(cookie)) if cookie else None
        return until is not None and self._now() < until

    async def enter(self, token: str) -> str | None:
        """Check a token; return a cookie for the visitor, or, after a delay, None if the token is wrong.

        Raises:
            TooManyTries: too many wrong tokens are being answered; try again later.
        """
        if self._digest is not None and hmac.compare_digest(self._digest, digest_of(token)):
            cookie = secrets.token_urlsafe(32)
            self._visits[digest_of(cookie)] = self._now() + VISIT_S
            while len(self._visits) > VISITORS_MAX:
                self._visits.popitem(last=False)
            return cookie
        if self._refusing >= REFUSALS_MAX:
            raise TooManyTries
        self._refusing += 1
        try:
            await asyncio.sleep(REFUSAL_S)
        finally:
            self._refusing -= 1
        return None
