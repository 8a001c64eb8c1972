"""psdctl checkpoints, verify, export, import: what they print and how they end."""

from __future__ import annotations

import json

import pytest
import safetensors.numpy
from helpers_checkpoint import cut_of, parts, small_spec, store

from psd.checkpoint import CheckpointDirectory
from psd.cli.ctl import checkpoints
from psd.cli.psdctl import main


@pytest.fixture
def place(tmp_path):
    """Two valid checkpoints, and one that is not complete."""
    directory = CheckpointDirectory(str(tmp_path))
    for step in (7, 8):
        store(directory, cut_of(small_spec(), 2, step))
    cut = cut_of(small_spec(), 2, 9)
    directory.write_part(cut, 0, parts(cut, 0))
    return tmp_path


def _name(step):
    return cut_of(small_spec(), 2, step).name


def _damage(place, step):
    path = place / _name(step) / "shard-00001-of-00002.chunks"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_checkpoints_when_listed_then_states_and_reasons_are_shown(place, capsys):
    assert main(["checkpoints", str(place)]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["CHECKPOINT", "STATE", "STEP", "TIMELINE", "CREATED", "SHARDS", "SIZE"]
    assert lines[1].split()[:5] == [_name(9), "incomplete", "9", "0", "-"]
    assert lines[2].split()[:6] == [_name(8), "valid", "8", "0", "2023-11-14", "22:13:20Z"]
    assert lines[-1] == f"incomplete: {_name(9)}/manifest.json: is missing; 1 of 2 parts are there"


def test_checkpoints_when_asked_for_json_then_the_newest_valid_one_is_named(place, capsys):
    assert main(["checkpoints", str(place), "--json"]) == 0

    shown = json.loads(capsys.readouterr().out)
    assert shown["newest"] == _name(8)
    assert [entry["state"] for entry in shown["checkpoints"]] == ["incomplete", "valid", "valid"]
    assert set(shown["checkpoints"][1]) == {
        "name",
        "state",
        "step",
        "timeline",
        "created_at",
        "shard_count",
        "nbytes",
        "reason",
        "rows",
        "base",
        "learning_rate_scale",
    }


def test_checkpoints_when_one_is_damaged_or_none_is_valid_then_the_status_is_1(place, tmp_path, capsys):
    (place / _name(7) / "shard-00001-of-00002.json").unlink()

    assert main(["checkpoints", str(place)]) == 1
    assert main(["checkpoints", str(tmp_path / "nothing")]) == 1

    shown = capsys.readouterr().out
    assert f"damaged: {_name(7)}/shard-00001-of-00002.json: is missing" in shown
    assert "no checkpoints in" in shown


def test_verify_when_all_is_well_then_says_so_of_each(place, capsys):
    assert main(["verify", str(place)]) == 0

    shown = capsys.readouterr().out
    assert shown.count("is as it was written") == 2
    assert f"{_name(9)}: incomplete, passed over" in shown


def test_verify_when_a_byte_was_flipped_then_the_file_is_named_and_the_status_is_1(place, capsys):
    _damage(place, 8)

    assert main(["verify", str(place)]) == 1
    assert main(["verify", str(place), _name(7)]) == 0

    shown = capsys.readouterr().out
    assert f"problem: {_name(8)}/shard-00001-of-00002.chunks: the bytes" in shown


@pytest.mark.parametrize("name", ["nothing", "timeline-00000-step-000000000001-zz"])
def test_verify_when_there_is_no_such_checkpoint_then_the_status_is_1(place, capsys, name):
    assert main(["verify", str(place), name]) == 1

    assert f"there is no checkpoint {name!r}" in capsys.readouterr().err


def test_verify_when_the_incomplete_one_is_asked_for_then_the_status_is_1(place, capsys):
    assert main(["verify", str(place), _name(9)]) == 1

    assert "manifest.json: is missing" in capsys.readouterr().out


def test_export_when_no_name_is_given_then_the_newest_valid_one_is_written(place, tmp_path, capsys):
    target = tmp_path / "model.safetensors"

    assert main(["export", str(place), "--to", str(target)]) == 0

    assert f"6 tensors of step 8, from {_name(8)}" in capsys.readouterr().out
    with safetensors.safe_open(target, "np") as opened:
        assert opened.metadata() == {"format": "pt", "psd_checkpoint": _name(8)}
        assert opened.get_tensor("embedding.weight").shape == (301, 33)


def test_export_when_it_cannot_then_one_line_says_why(place, tmp_path, capsys):
    _damage(place, 8)

    assert main(["export", str(place), "--to", str(tmp_path / "model.safetensors")]) == 1
    assert main(["export", str(place), "nothing", "--to", str(tmp_path / "model.safetensors")]) == 1
    assert main(["export", str(tmp_path / "nothing"), "--to", str(tmp_path / "model.safetensors")]) == 1
    assert main(["export", str(place), _name(7), "--to", str(place / _name(7) / "manifest.json" / "model.safetensors")]) == 1

    errors = capsys.readouterr().err.splitlines()
    assert "were changed" in errors[0]
    assert "there is no checkpoint 'nothing'" in errors[1]
    assert "there is no valid checkpoint" in errors[2]
    assert "File exists" in errors[3]
    assert not (tmp_path / "model.safetensors").exists()


def test_export_when_there_is_a_config_then_a_directory_is_written(place, tmp_path, capsys):
    config, target = tmp_path / "config.json", tmp_path / "made" / "model"
    config.write_text('{"model_type": "bert"}')

    assert main(["export", str(place), "--config", str(config), "--to", f"{target}/"]) == 0

    assert f"{target}/: 6 tensors of step 8" in capsys.readouterr().out
    assert sorted(path.name for path in target.iterdir()) == ["config.json", "model.safetensors"]
    assert (target / "config.json").read_text() == config.read_text()
    with safetensors.safe_open(target / "model.safetensors", "np") as opened:
        assert len(opened.keys()) == 6


def test_export_when_the_config_is_none_then_nothing_is_written(place, tmp_path, capsys):
    config, target = tmp_path / "config.json", tmp_path / "model"
    command = ["export", str(place), "--config", str(config), "--to"]

    assert main([*command, str(target)]) == 1
    for text in ("[1]", "{", b"\xff{}", "[" * 100_000):
        config.write_bytes(text if isinstance(text, bytes) else text.encode())
        assert main([*command, str(target)]) == 1
        assert "is no config.json, a JSON object" in capsys.readouterr().err
    for more, message in [([str(target), "--table", "user"], "not with --table"), (["a.safetensors"], "must be a directory")]:
        with pytest.raises(SystemExit) as exit_:
            main([*command, *more])
        assert exit_.value.code == 2
        assert message in capsys.readouterr().err
    assert not target.exists()


@pytest.mark.parametrize("command", ["checkpoints", "verify", "export", "import"])
def test_main_when_asked_for_help_then_it_explains(command, capsys):
    with pytest.raises(SystemExit) as exit_:
        main([command, "--help"])

    assert exit_.value.code == 0
    shown = capsys.readouterr().out
    assert "examples:" in shown
    assert "exit status:" in shown
    assert max(map(len, shown.splitlines())) <= 115


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["checkpoints"], "the following arguments are required: URL"),
        (["export", "/x"], "the following arguments are required: --to"),
        (["verify", "nosuch://x"], "Protocol not known: nosuch"),
    ],
)
def test_main_when_an_option_is_wrong_then_one_line_says_what_was_expected(options, words, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(options)

    assert exit_.value.code == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_progress_when_a_person_looks_then_each_percent_is_shown_once(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    show = checkpoints._progress("reading x")

    for done in (0, 1, 1, 400, 1000):
        show(done, 1000)

    assert capsys.readouterr().err == "\rreading x: 0 %\rreading x: 40 %\rreading x: 100 %\r\x1b[K"
