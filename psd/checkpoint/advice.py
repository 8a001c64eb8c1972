"""Names of the settings that say who asks a store, by its kind, for messages when it refuses somebody.

The packages that fsspec uses say what is wrong, and not where they have it from. Must not know the settings' values.
"""

from __future__ import annotations

import re

_REFUSED = re.compile(
    r"access key|anonymous|authenticat|credential|expired|forbidden|invalid.token|not a valid .*key|signature|unauthorized|"
    r"access.denied|private key",
    re.IGNORECASE,
)
"""Words with which packages say that somebody is not who he should be. SFTP's "permission denied" is about files."""

_AWS = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
_GOOGLE = "GOOGLE_APPLICATION_CREDENTIALS, a file with a service account's key"
_SSH = "FSSPEC_SFTP_USERNAME, and FSSPEC_SFTP_KEY_FILENAME or FSSPEC_SFTP_PASSWORD, or ssh's agent and the keys in ~/.ssh"
_SETTINGS = {"s3": _AWS, "s3a": _AWS, "gs": _GOOGLE, "gcs": _GOOGLE, "sftp": _SSH, "ssh": _SSH}


def with_advice(words: str, url: str, error: BaseException) -> str:
    """Words about an error; with what to set, if it is a refusal by a store that we know."""
    scheme = url.partition("://")[0].rpartition("::")[2]
    if scheme not in _SETTINGS or not _REFUSED.search(f"{type(error).__name__} {error}"):
        return words
    return f"{words.rstrip('.')}; {scheme}:// takes who asks from {_SETTINGS[scheme]}"
