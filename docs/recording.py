"""Trains twice, kills a shard in the middle of the second run, and draws what psd-run said, at the pace at which it said it.

    python docs/recording.py [--data FOLDER]     run examples/mnist.py twice, keep what is said in killed-shard.log, draw it
    python docs/recording.py --draw              only draw what was kept

With exact aggregation both runs must report the same accuracy and loss at every step; if they do not, nothing is written.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from pictures import IMAGES, WIDTH, Scheme, picture, words, write

ROOT = Path(__file__).parents[1]
COMMAND = "psd-run --shards 2 --workers 2 --aggregation exact examples/mnist.py"
TITLES = ("Undisturbed", "With kill -9 of a shard")
LOG = "killed-shard.log"

ROWS, LINE, PANE, LEFT = 11, 17, 44, 24
CHARACTERS = 102
HOLD_S = 6.0
"""Time for which the end is shown before the picture begins anew."""

Said = list[tuple[float, str]]
"""Seconds since the first word of a worker, and a line."""


def run(options: list[str], environment: dict[str, str], kill_at: int | None) -> Said:
    """Run the job; with `kill_at`, kill shard 1 as soon as that step is reported.

    Raises:
        RuntimeError: the job failed, or never reported that step.
    """
    command = [str(Path(sys.executable).parent / "psd-run"), *COMMAND.split()[1:], *options]
    job = subprocess.Popen(  # noqa: S603 (this repository's own command)
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    assert job.stdout is not None
    said: Said = []
    begun, killed = 0.0, False
    for text in job.stdout:
        now = time.monotonic()
        begun = begun or (now if text.startswith("[worker") else 0.0)
        said.append((now - begun if begun else 0.0, text.rstrip()))
        if kill_at is not None and not killed and re.search(rf"step +{kill_at} of", text):
            pid = shard_of(job.pid)
            os.kill(pid, signal.SIGKILL)
            said.append((time.monotonic() - begun, f"$ kill -9 {pid}    # shard 1, from another terminal"))
            killed = True
    if job.wait() != 0 or killed != (kill_at is not None):
        raise RuntimeError("\n".join(text for _, text in said))
    return said


def shard_of(launcher: int) -> int:
    """The process of shard 1 among the children of this psd-run, and no other."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            arguments = (folder / "cmdline").read_text().split("\0")
        except OSError:  # it has ended meanwhile
            continue
        if parent == launcher and "psd.cli.server" in arguments and "1/2" in arguments:
            return int(folder.name)
    raise RuntimeError("psd-run has no shard 1")


def results(said: Said) -> list[str]:
    """Results: accuracy and loss at each step reported, and the accuracy in the end."""
    return [found[0] for _, text in said if (found := re.search(r"accuracy +[\d.]+%  loss [\d.]+|\"accuracy\": [\d.]+", text))]


def record(data: Path | None, options: list[str], kill_at: int) -> list[Said]:
    """Lines that the two runs have written.

    Raises:
        RuntimeError: a job failed, or they did not learn the same.
    """
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        if data is not None:  # the example finds it where it keeps what it has downloaded
            (Path(cache) / "psd").mkdir()
            (Path(cache) / "psd" / "mnist").symlink_to(data.resolve())
            environment["XDG_CACHE_HOME"] = cache
        runs = [run(options, environment, None), run(options, environment, kill_at)]
    if not results(runs[0]) or results(runs[0]) != results(runs[1]):
        raise RuntimeError(f"the results differ:\n{results(runs[0])}\n{results(runs[1])}")
    return runs


def kept(runs: list[Said]) -> str:
    """The runs as a text."""
    return "".join(f"$ {COMMAND}\n" + "".join(f"{seconds:8.3f} {text}\n" for seconds, text in said) for said in runs)


def read(text: str) -> list[Said]:
    """The runs in such a text."""
    runs: list[Said] = []
    for each in text.splitlines():
        if each == f"$ {COMMAND}":
            runs.append([])
        else:
            runs[-1].append((float(each[:8]), each[9:]))
    return runs


def drawn(runs: list[Said], scheme: Scheme) -> str:
    """The picture: two terminals above each other, which scroll at the same time."""
    total = max(said[-1][0] for said in runs) + HOLD_S
    height = PANE + ROWS * LINE + 14
    parts, style = [], ".term{font:12px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}.run{font-weight:600}"
    style += (
        f".run{{fill:{scheme.ours[0]}}}.kill{{fill:{scheme.bad};font-weight:600}}.done{{fill:{scheme.good};font-weight:600}}"
    )
    for number, said in enumerate(runs):
        top = height * number
        parts += [
            words(LEFT, top + 26, TITLES[number], "title"),
            words(WIDTH - LEFT, top + 26, f"$ {COMMAND}", "faint", "end"),
            f'<svg x="0" y="{top + PANE - 6}" width="{WIDTH}" height="{ROWS * LINE + 4}">',
            f'<g class="pane{number}" transform="translate(0 {LINE * (ROWS - len(said))})" xml:space="preserve">',
            *(words(LEFT, LINE * row + 13, shown(each), f"term {kind_of(each[1])}") for row, each in enumerate(said)),
            "</g></svg>",
        ]
        style += scrolled(f"pane{number}", said, total)
    style += "@media (prefers-reduced-motion:reduce){.pane0,.pane1{animation:none}}"
    same = results(runs[0])[-1].replace('"accuracy": ', "accuracy ")
    label = f"Two runs of {COMMAND}. In the second one a shard is killed and started again. Both end with {same}."
    return picture(scheme, 2 * height + 4, label, parts, style)


def scrolled(name: str, said: Said, total: float) -> str:
    """CSS that has the newest line at the bottom at each moment."""
    places = {round(100 * seconds / total, 2): LINE * (ROWS - number) for number, (seconds, _) in enumerate(said, 1)}
    frames = "".join(f"{at:g}%{{transform:translateY({y}px)}}" for at, y in ({0.0: ROWS * LINE} | places).items())
    frames += f"100%{{transform:translateY({LINE * (ROWS - len(said))}px)}}"
    return f".{name}{{animation:{name} {total:.2f}s step-end infinite}}@keyframes {name}{{{frames}}}"


def shown(each: tuple[float, str]) -> str:
    """A line with its time, cut to the width of the terminal."""
    text = f"{each[0]:5.1f} s  {each[1]}"
    return text if len(text) <= CHARACTERS else text[: CHARACTERS - 1] + "…"


def kind_of(text: str) -> str:
    """The class of a line in the style sheet."""
    if text.startswith("$ kill"):
        return "kill"
    if " result " in text:
        return "done"
    return "run" if text.startswith("[psd-run]") else ""


def main() -> None:
    """Record, unless that was done; draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder of MNIST's files (default: what examples/mnist.py downloads)")
    parser.add_argument("--draw", action="store_true", help="only draw the recording that is there")
    parser.add_argument("--kill-at", type=int, default=200, help="step after which the shard is killed (default %(default)s)")
    parser.add_argument("--out", type=Path, default=IMAGES, help="folder for recording and pictures (default: docs/images)")
    parser.add_argument("options", nargs="*", help="of examples/mnist.py, after --")
    args = parser.parse_args()
    if not args.draw:
        (args.out / LOG).write_text(kept(record(args.data, args.options, args.kill_at)))
    runs = read((IMAGES if args.draw else args.out).joinpath(LOG).read_text())
    write(args.out, "killed-shard", lambda scheme: drawn(runs, scheme))


if __name__ == "__main__":
    main()
