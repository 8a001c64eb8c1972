"""Certificates for tests: an authority that signs what is asked for, also what is expired or another host's."""

from __future__ import annotations

import datetime as dt
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


@dataclass(frozen=True)
class Pair:
    """A certificate and its key, as PEM."""

    cert: bytes
    key: bytes

    def write(self, directory: Path, name: str) -> dict[str, str]:
        """Put both into files, private ones, over what was there; their paths, as settings."""
        paths = {"tls_cert": directory / f"{name}.crt", "tls_key": directory / f"{name}.key"}
        for path, data in zip(paths.values(), (self.cert, self.key), strict=True):
            path.write_bytes(data)
            path.chmod(0o600)
        return {setting: str(path) for setting, path in paths.items()}


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _host(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


class Authority:
    """Signs certificates. `pem`: its own."""

    def __init__(self, name: str) -> None:
        self._name = _name(name)
        self._key = ec.generate_private_key(ec.SECP256R1())
        builder = self._builder(self._name, self._key, 3650).add_extension(
            x509.BasicConstraints(ca=True, path_length=None), True
        )
        self.pem = builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, days: float) -> x509.CertificateBuilder:
        end = dt.datetime.now(dt.timezone.utc) + dt.timedelta(days=days)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(end - dt.timedelta(days=4000))
            .not_valid_after(end)
        )

    def issue(self, *hosts: str, days: float = 1.0) -> Pair:
        """A certificate for these names and addresses, valid for so many days from now; negative: it has expired."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = x509.SubjectAlternativeName([_host(host) for host in hosts])
        certificate = self._builder(_name(hosts[0]), key, days).add_extension(names, False).sign(self._key, hashes.SHA256())
        return Pair(
            certificate.public_bytes(serialization.Encoding.PEM),
            key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
        )
