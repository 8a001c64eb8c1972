"""The shard's side of TLS: one set of files, for gRPC and for the bulk lane, read again when they change.

A connection keeps the certificate with which it began; each new one gets the newest. Must not know who may do what: access.py
does.
"""

from __future__ import annotations

import ssl

import grpc

from psd.contract.config import ServerConfig
from psd.contract.tls import Pem, server_files
from psd.contract.watched import Watched


class ServerTls:
    """The shard's certificate, its key, and the authorities that sign clients' certificates.

    Raises:
        ConfigError: a file cannot be read, or the files do not belong together.
    """

    def __init__(self, config: ServerConfig) -> None:
        files = server_files(config.tls_cert, config.tls_key, config.tls_client_ca)
        self._files = Watched(files.paths, files.load)
        self._given: Pem | None = None  # the files that gRPC has

    def context(self) -> ssl.SSLContext:
        """The TLS context for the next connection of the bulk lane."""
        return self._files.current()[1]

    def credentials(self) -> grpc.ServerCredentials:
        """Credentials for the gRPC port; they are read again at each handshake."""
        self._given = self._files.current()[0]
        must_show_certificate = bool(self._given.ca)
        return grpc.dynamic_ssl_server_credentials(
            _configuration(self._given),
            self._changed,  # type: ignore[arg-type]  # which may say None: nothing has changed
            must_show_certificate,
        )

    def _changed(self) -> grpc.ServerCertificateConfiguration | None:
        pem = self._files.current()[0]
        if pem == self._given:
            return None
        self._given = pem
        return _configuration(pem)


def _configuration(pem: Pem) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(pem.key, pem.cert)], pem.ca or None)
