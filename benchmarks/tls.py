"""Measures what TLS costs: the dense step of one worker and one shard, over each transport, with and without it.

    python benchmarks/tls.py [--transports shm,tcp,grpc] [--model resnet50] [--rounds 10] [--steps 5] [--json FILE]

All take turns in one run, some steps each. The ratios are the figures to compare; over shared memory only the control calls are
encrypted. What each has computed is verified, to the bit. The certificate is made by the command openssl. Exit status: 1 if psd
failed or was wrong; 2 if there is no such command.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import _contenders as contenders
import _report as report
from _processes import cleanly
from _report import ratio
from _turns import Match, usable

REQUEST = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 -subj /CN=psd -addext"


def certificate(directory: Path) -> contenders.Tls:
    """A self-signed certificate for 127.0.0.1."""
    cert, key = directory / "tls.crt", directory / "tls.key"
    command = ["openssl", *REQUEST.split(), "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
    subprocess.run(command, check=True, capture_output=True)
    return contenders.Tls(("--tls-cert", str(cert), "--tls-key", str(key)), str(cert))


def main() -> int:
    """Print the figures."""
    parser = report.parser(__doc__, transports="shm,tcp,grpc", rounds=10, steps=5)
    parser.add_argument("--model", default="resnet50", help="as in step.py (default: %(default)s)")
    args = parser.parse_args()
    if shutil.which("openssl") is None:
        print("tls.py cannot run here: there is no 'openssl' command", file=sys.stderr)
        return 2
    about = report.machine()
    transports, left_out = usable(args.transports)
    with cleanly() as stack, tempfile.TemporaryDirectory() as directory:
        match, tls = Match(stack), certificate(Path(directory))
        for transport in transports:
            match.add(f"psd {transport}", contenders.psd(transport, 1, 1, args.model))
            match.add(f"psd {transport} tls", contenders.psd(transport, 1, 1, args.model, tls=tls))
        found = match.run(args.rounds, args.steps)
        match.close()
    left_out |= match.left_out
    median_s = {contender.name: statistics.median(contender.seconds) for contender in found}
    print(f"{args.model}, W = 1, S = 1; medians of {args.rounds * args.steps} steps")
    print(report.machine_line(about) + "\n")
    rows = [
        [
            contender.name,
            *(report.number(1e3 * value, 1) for value in (median_s[contender.name], min(contender.seconds))),
            report.number(contender.bytes_per_step / median_s[contender.name] / 1e9),
            report.number(ratio(median_s[contender.name], median_s.get(contender.name.removesuffix(" tls")))),
        ]
        for contender in found
    ]
    print(report.table(["system", "ms/step", "fastest", "GB/s", "x without"], rows))
    results = [{"system": contender.name, "steps_s": contender.seconds} for contender in found]
    is_failed = any(name.startswith("psd") for name in match.failed)
    return report.conclude(args.json, {"machine": about, "results": results}, [], left_out, is_failed=is_failed)


if __name__ == "__main__":
    sys.exit(main())
