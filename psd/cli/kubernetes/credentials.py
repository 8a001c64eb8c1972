"""Certificates and tokens for a job on Kubernetes, as Secrets; `psdctl credentials` prints them.

The certificate is self-signed: one key pair, valid only for the shards' names, trusted by everybody who has the certificate. It
is made with the openssl command, because Python's library cannot make one, and the package cryptography would be a compiled
dependency of every install. Tokens are 256 random bits. Nothing is written to disk.
"""

from __future__ import annotations

import argparse
import json
import re
import secrets
import subprocess
from typing import Any

from psd.cli.words import arguments
from psd.cli.words.arguments import EXIT_OK, CommandFailed, Commands, Options, add_options
from psd.contract.config import ConfigError
from psd.contract.settings import Setting

DAYS = 825
ROLES = ("worker", "reader", "admin")
SHARDS_MAX = 256

_NAME = re.compile(r"[a-z]([a-z0-9-]{0,39}[a-z0-9])?")

_DESCRIPTION = """\
Make a certificate for the shards of a job on Kubernetes, and a token for each role, and print them as the
Secrets that the manifests of psd refer to. Needs the openssl command."""

_EPILOG = """\
examples:
  psdctl credentials | kubectl apply -f -                        for deploy/base
  psdctl credentials --name mnist | kubectl -n training apply -f -

psd-run --on kubernetes makes them by itself where there are none. The output holds the private key: do not
keep it. To renew them, apply new ones: shards and workers read the files again.

exit status:
  0     printed
  1     the openssl command is missing, or failed
  2     the options are wrong"""


def check_name(name: str) -> str:
    """Raise ConfigError unless Kubernetes accepts the name for a StatefulSet and its pods."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"--name: expected at most 41 small letters, digits and hyphens, a letter first, got {name!r}")
    return name


def secrets_of(name: str, namespace: str = "", *, shards: int = SHARDS_MAX) -> list[dict[str, Any]]:
    """The Secrets NAME-tls and NAME-tokens. The certificate is for this number of shards.

    Raises:
        ConfigError: openssl is missing, or failed.
    """
    certificate, key = _certificate([f"{name}-{index}.{name}" for index in range(shards)] + ["localhost"])
    tokens = {role: secrets.token_urlsafe(32) for role in ROLES}
    lines = "".join(f"{role} {token}\n" for role, token in tokens.items())
    contents = {
        "tls": ("kubernetes.io/tls", {"tls.crt": certificate, "tls.key": key, "ca.crt": certificate}),
        "tokens": ("Opaque", {"tokens": lines, **{role: f"{token}\n" for role, token in tokens.items()}}),
    }
    return [
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {
                "name": f"{name}-{what}",
                **({"namespace": namespace} if namespace else {}),
                "labels": {"app.kubernetes.io/name": "psd", "app.kubernetes.io/instance": name},
            },
            "type": kind,
            "stringData": data,
        }
        for what, (kind, data) in contents.items()
    ]


def _certificate(names: list[str]) -> tuple[str, str]:
    """A certificate for these names and its key, as PEM."""
    alternatives = ",".join(f"DNS:{name}" for name in names)
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", str(DAYS)]
    command += ["-subj", "/CN=psd", "-addext", f"subjectAltName={alternatives}", "-keyout", "-", "-out", "-"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603
    except FileNotFoundError:
        raise ConfigError("openssl: there is no such command; it makes the shards' certificate") from None
    except subprocess.CalledProcessError as error:
        raise ConfigError(f"openssl: {error.stderr.strip()}") from None
    found = re.finditer(r"-----BEGIN ([A-Z ]+)-----.*?-----END \1-----\n", done.stdout, re.DOTALL)
    pem = {block[1]: block[0] for block in found}
    return pem["CERTIFICATE"], pem["PRIVATE KEY"]


_OPTIONS: Options = {
    "name": Setting("NAME", "name of the job, that is of its StatefulSet"),
    "shards": Setting("N", "how many shards the certificate is valid for", int),
}


def add_command(commands: Commands) -> None:
    """Add `credentials` to psdctl."""
    parser = arguments.add_command(commands, "credentials", "[--name NAME] [--shards N]", _DESCRIPTION, _EPILOG)
    add_options(parser.add_argument_group("job"), _OPTIONS, {"name": "psd", "shards": 64})
    parser.finish(_run)


def _run(args: argparse.Namespace) -> int:
    if not 1 <= args.shards <= SHARDS_MAX:
        args.parser.error(f"--shards: expected 1 to {SHARDS_MAX}, got {args.shards}")
    check_name(args.name)
    try:
        items = secrets_of(args.name, shards=args.shards)
    except ConfigError as error:
        raise CommandFailed(str(error)) from error
    print(json.dumps({"apiVersion": "v1", "kind": "List", "items": items}, indent=1))
    return EXIT_OK
