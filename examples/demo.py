"""`make demo`: train the MNIST example synchronously, then asynchronously, on 2 shards x 2 workers, and compare.

$ python examples/demo.py [--data DIR] [--steps N]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).with_name("mnist.py")
PSD_RUN = Path(sys.executable).with_name("psd-run")


def run(consistency: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run the example and show its output; return the facts in its last line. Exits if the run fails."""
    command = [str(PSD_RUN), "--shards", "2", "--workers", "2", "--consistency", consistency]
    command += [str(SCRIPT), "--steps", str(args.steps), "--data", args.data, *args.others]
    print(f"\n$ {' '.join(command)}", flush=True)
    result = None
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603 (our own script)
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            _, is_result, facts = line.partition("result {")
            if is_result:
                result = json.loads("{" + facts)
    if process.returncode or result is None:
        sys.exit(f"demo: the {consistency} run failed with status {process.returncode}")
    return {"mode": consistency, **result}


def main() -> None:
    """Run both and print the table."""
    parser = argparse.ArgumentParser(description="Train the MNIST example in two modes; other options are the example's.")
    parser.add_argument("--steps", type=int, default=400, help="steps of each worker (default %(default)s)")
    parser.add_argument("--data", help="folder of MNIST's four files, or 'digits', scikit-learn's (default: downloads MNIST)")
    args, others = parser.parse_known_args()
    args.others = others
    if not args.data:
        import datasets  # which loads torch: a second that nothing else here needs

        args.data = datasets.find()

    rows = [run(consistency, args) for consistency in ("sync", "async")]
    print(f"\n{rows[0]['data']}, 2 shards, 2 workers")
    print("mode    steps   accuracy   steps/s of each worker")
    for row in rows:
        print(f"{row['mode']:6} {row['steps']:6d} {row['accuracy']:10.1%} {row['steps_per_s']:9.1f}")


if __name__ == "__main__":
    main()
