"""Credentials of a client, and the certificates by which it knows shards: files that are read again when they change.

For workers, readers and psdctl. Must not know gRPC: the code that connects hands these to it.
"""

from __future__ import annotations

import ssl

from psd.contract.config import check_client_tls, parse_address
from psd.contract.tls import Pem, client_files, probe
from psd.contract.tokens import metadata_of, read_token
from psd.contract.watched import Watched

MetadataOut = tuple[tuple[str, str], ...]


class Credentials:
    """Credentials of one client.

    Args:
        tls_ca: PEM file with the certificates that sign those of the shards; empty: no TLS.
        tls_cert, tls_key: PEM files with the client's own certificate; empty: none. token_file: a file with its token.

    Raises:
        ConfigError: a file cannot be read, or holds something else, or does not fit the others; names the file.
    """

    def __init__(self, tls_ca: str = "", tls_cert: str = "", tls_key: str = "", token_file: str = "") -> None:
        check_client_tls(tls_ca, tls_cert, tls_key)
        self._token = Watched((token_file,), lambda: read_token(token_file)) if token_file else None
        files = client_files(tls_ca, tls_cert, tls_key)
        self._tls = Watched(files.paths, files.load) if tls_ca else None

    @property
    def has_token(self) -> bool:
        """True if calls carry a token."""
        return self._token is not None

    @property
    def has_tls(self) -> bool:
        """True if connections use TLS."""
        return self._tls is not None

    def metadata(self) -> MetadataOut | None:
        """Metadata of each call."""
        return None if self._token is None else metadata_of(self._token.current())

    def has_other_token(self, refused: MetadataOut | None) -> bool:
        """True if the file holds another token than the one that a call carried; reads the file if needed.

        Many calls may be refused at once: the first one that finds a new token must not keep the others from trying again.
        """
        if self._token is None:
            return False
        if self.metadata() == refused:
            self._token.refresh()
        return self.metadata() != refused

    def pem(self) -> Pem | None:
        """PEM files' contents, for gRPC; None: no TLS."""
        return None if self._tls is None else self._tls.current()[0]

    def context(self) -> ssl.SSLContext | None:
        """TLS context for the bulk lane; None: no TLS."""
        return None if self._tls is None else self._tls.current()[1]

    def why_not(self, address: str) -> str | None:
        """The reason why gRPC cannot connect to HOST:PORT, if it is TLS or its absence. Dials, for a second or two at most."""
        host, port = parse_address(address, "servers")
        context = None
        if self._tls is not None:
            context = self._tls.current()[1]
        return probe(host.strip("[]"), port, context)
