"""TLS: certificates as files, and the reasons why a connection fails.

gRPC and the bulk lane use the same files. gRPC takes their bytes; the bulk lane, and the check that the files belong together,
use Python's ssl. The bulk lane, where both ends are psd's, has TLS 1.3; the gRPC port 1.2 or later. tls_socket.py moves the
bytes.
"""

from __future__ import annotations

import socket
import ssl
from dataclasses import dataclass

from psd.contract.config import ConfigError
from psd.contract.watched import read, read_secret

PROBE_S = 2.0


@dataclass(frozen=True)
class Pem:
    """Contents of the files; empty for a file that is not given.

    Attributes:
        ca: certificates of the authorities that sign the other side's certificates. cert, key: this side's own.
    """

    ca: bytes = b""
    cert: bytes = b""
    key: bytes = b""


@dataclass(frozen=True)
class TlsFiles:
    """One side's PEM files.

    Args:
        ca, cert, key: paths; empty: none. is_server: True for a shard's. names: of the three settings, for error messages.
    """

    ca: str
    cert: str
    key: str
    is_server: bool
    names: tuple[str, str, str]

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths of the given files."""
        return tuple(path for path in (self.ca, self.cert, self.key) if path)

    def load(self) -> tuple[Pem, ssl.SSLContext]:
        """Read the files; return their contents, and a context for the bulk lane.

        Raises:
            ConfigError: a file cannot be read or is not PEM, or certificate and key do not belong together; names the file.
        """
        ca_name, cert_name, key_name = self.names
        pem = Pem(
            read(self.ca, ca_name) if self.ca else b"",
            read(self.cert, cert_name) if self.cert else b"",
            read_secret(self.key, key_name) if self.key else b"",
        )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if self.is_server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        # Allow an end without TLS's closing message: lengths show a truncated message; half-closed connections stay usable.
        context.options |= getattr(ssl, "OP_IGNORE_UNEXPECTED_EOF", 0)
        if self.is_server:
            context.num_tickets = 0
        if self.ca:
            try:
                context.load_verify_locations(cadata=pem.ca.decode("ascii"))
            except (ssl.SSLError, ValueError):  # text that is not ASCII raises ValueError
                raise ConfigError(f"{ca_name}: {self.ca} holds no PEM certificates") from None
            context.verify_mode = ssl.CERT_REQUIRED
        if self.cert:
            self._load_own(context, pem)
        return pem, context

    def _load_own(self, context: ssl.SSLContext, pem: Pem) -> None:
        _, cert_name, key_name = self.names
        if b"BEGIN CERTIFICATE" not in pem.cert:
            raise ConfigError(f"{cert_name}: {self.cert} holds no PEM certificate")
        if b"PRIVATE KEY" not in pem.key:
            raise ConfigError(f"{key_name}: {self.key} holds no PEM private key")
        try:
            context.load_cert_chain(self.cert, self.key, _refuse_password)
        except _HasPassword:
            raise ConfigError(f"{key_name}: {self.key} has a password; a key without one is needed") from None
        except (ssl.SSLError, OSError, ValueError) as error:
            reason = getattr(error, "reason", None) or str(error)
            why = "do not belong together" if "MISMATCH" in reason else f"cannot be used: {reason}"
            raise ConfigError(f"{cert_name}, {key_name}: {self.cert} and {self.key} {why}") from None


class _HasPassword(Exception):
    pass


def _refuse_password() -> str:
    raise _HasPassword


def server_files(cert: str, key: str, client_ca: str) -> TlsFiles:
    """TLS files named by psd-server's flags."""
    return TlsFiles(client_ca, cert, key, is_server=True, names=("--tls-client-ca", "--tls-cert", "--tls-key"))


def client_files(ca: str, cert: str, key: str) -> TlsFiles:
    """TLS files named by a client's settings."""
    return TlsFiles(ca, cert, key, is_server=False, names=("tls_ca", "tls_cert", "tls_key"))


# -- why no connection came about ----------------------------------------------------------------------------------------

_FOREIGN = "is not signed by an authority in tls_ca"
_CERTIFICATE = {
    9: "is not valid yet; is the clock right?",
    10: "has expired",
    18: _FOREIGN,
    19: _FOREIGN,
    20: _FOREIGN,
    21: _FOREIGN,
    62: "is not for {host!r}, the name in servers",
    64: "is not for {host}, the address in servers",
}
"""Explanations of OpenSSL's error numbers about certificates, for the side that connects."""

_REFUSED = (
    "the shard admits nobody with this client's certificate (tls_cert), or without one: its --tls-client-ca says whose "
    "signature it requires"
)


def what_is_wrong(error: OSError, host: str) -> str | None:
    """The reason why a handshake or a first read failed, in words; None if it is not TLS."""
    if isinstance(error, ssl.SSLCertVerificationError):
        known = _CERTIFICATE.get(error.verify_code, f"is refused: {error.verify_message}")
        return f"the shard's certificate {known.format(host=host)}"
    if isinstance(error, ssl.SSLError):
        if "WRONG_VERSION_NUMBER" in (error.reason or ""):
            return "the shard does not speak TLS: was it started with --tls-cert? If not, leave tls_ca out"
        if not isinstance(error, (ssl.SSLEOFError, ssl.SSLZeroReturnError)):
            return f"the TLS handshake failed: {error.reason}"
    return None


def probe(host: str, port: int, context: ssl.SSLContext | None) -> str | None:
    """Connect to a gRPC port, to find out why gRPC cannot: the reason in words, or None if it is not TLS.

    gRPC itself says only that there is no connection. context: the client's; None: it uses no TLS.
    """
    try:
        with socket.create_connection((host, port), PROBE_S) as sock:
            if context is None:
                return _probe_plain(sock)
            with context.wrap_socket(sock, server_hostname=host) as tls:
                if not tls.recv(1):  # else the shard has begun to speak HTTP/2
                    return _REFUSED
    except OSError as error:
        return what_is_wrong(error, host)
    return None


def _probe_plain(sock: socket.socket) -> str | None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # only to find out; nothing is trusted
    try:
        context.wrap_socket(sock).close()
    except (ssl.SSLError, OSError) as error:
        if not isinstance(error, ssl.SSLError) or "WRONG_VERSION" in (error.reason or "") or isinstance(error, ssl.SSLEOFError):
            return None
    return "the shard speaks TLS: pass tls_ca, or set PSD_TLS_CA"
