"""psdctl plot: curves from JSON lines."""

import json
import math
import sys

import pytest

from psd.cli.psdctl import main


@pytest.fixture
def run(tmp_path):
    """run(name, {rank: [(step, scalars), ...]}) -> the directory, as psd-run --log-dir leaves it."""

    def write(name, workers, tail=""):
        directory = tmp_path / name
        directory.mkdir()
        (directory / "worker-0.log").write_text("epoch 1\n")
        for rank, points in workers.items():
            lines = [json.dumps({"time": 1e9 + step, "rank": rank, "step": step, "scalars": s}) + "\n" for step, s in points]
            (directory / f"worker-{rank}.jsonl").write_text("".join(lines) + tail)
        return str(directory)

    return write


def test_plot_merges_workers_step_by_step_and_what_a_restarted_one_repeats(run, capsys):
    """A worker that went back to step 2 has other values from there on; its last line was cut off by kill -9."""
    logs = run(
        "adam",
        {
            0: [(1, {"loss": 4.0}), (2, {"loss": 3.0}), (3, {"loss": 2.0}), (2, {"loss": 1.0})],
            1: [(1, {"loss": 2.0, "gap": "-Infinity"}), (3, {"loss": "NaN"})],
        },
        tail='{"time": 1, "rank": 0, "step": 1e400, "scalars": {}}\n' + "[" * 100_000 + '\n{"time": 1',
    )

    assert main(["plot", logs, "--json"]) == 0

    shown = capsys.readouterr()
    (found,) = json.loads(shown.out)["runs"]
    assert found["name"] == "adam"
    assert found["curves"]["loss"] == [
        {"step": 1, "time": 1e9 + 1, "mean": 3.0, "low": 2.0, "high": 4.0},
        {"step": 2, "time": 1e9 + 2, "mean": 1.0, "low": 1.0, "high": 1.0},
        {"step": 3, "time": 1e9 + 3, "mean": "NaN", "low": "NaN", "high": "NaN"},
    ]
    assert found["curves"]["gap"][0]["mean"] == "-Infinity"
    assert shown.err == "psdctl plot: adam: 6 lines that cannot be read are left out\n"


def test_plot_draws_a_panel_for_each_scalar_and_a_line_for_each_run(run, tmp_path, capsys):
    points = [(step, {"loss": math.exp(-step), "accuracy": "NaN" if step == 3 else 0.5}) for step in range(1, 6)]
    first, second = run("adam", {0: points, 1: points}), run("sgd", {0: points[:1]})

    for suffix, head in ((".svg", b"<?xml"), (".png", b"\x89PNG")):
        picture = tmp_path / f"picture{suffix}"
        assert main(["plot", first, second, "--to", str(picture), "--smooth", "2"]) == 0
        assert picture.read_bytes().startswith(head)
        assert capsys.readouterr().out == f"{picture}\n"
    text = (tmp_path / "picture.svg").read_text()
    assert [text.count(f"<!-- {word} -->") for word in ("loss", "accuracy", "adam", "sgd")] == [1, 1, 2, 2]


def test_plot_when_names_mean_something_to_matplotlib_then_they_are_shown_as_they_are(run, tmp_path, capsys):
    """Two $ begin mathematics there, which not every text is; _ begins the name of what no legend shows."""
    points = {0: [(step, {r"cost in $ of $\no": 1.0 / step}) for step in range(1, 4)]}
    runs = [run("_first", points), run(r"$\no$", points)]

    assert main(["plot", *runs, "--to", str(tmp_path / "picture.svg")]) == 0

    text = (tmp_path / "picture.svg").read_text()
    assert [text.count(f"<!-- {word} -->") for word in (r"cost in $ of $\no", "_first", r"$\no$")] == [1, 1, 1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--to", "curves.pdf"], "--to: expected a file that ends in .png or .svg, got 'curves.pdf'"),
        (["--smooth", "0"], "--smooth: expected 1 or more, got 0"),
        (["--scalar", "speed"], "--scalar: no run has 'speed'; there are loss"),
        (["nowhere"], "nowhere cannot be read: No such file or directory"),
        (["--to", "no/such/place.svg"], "--to: no/such/place.svg: No such file or directory"),
        ([], "it needs matplotlib, which is not installed: pip install 'psd[plot]'"),
    ],
)
def test_plot_when_it_cannot_draw_then_one_line_says_why(options, message, run, refusal, monkeypatch):
    logs = run("adam", {0: [(1, {"loss": 1.0})]})
    if not options:
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)

    assert message in refusal(main, ["plot", logs, *options])
