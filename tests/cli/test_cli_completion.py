"""psdctl completion, in the shells themselves: what a user has typed, and what the tab key makes of it."""

import os
import pty
import shutil
import subprocess

import pytest

from psd.cli.psdctl import main

TYPED = {
    "psdctl se": "psdctl set-lr ",
    "psdctl top --sort awa": "psdctl top --sort awaited ",
    "psdctl top --sort=awa": "psdctl top --sort=awaited ",
    "psdctl completion f": "psdctl completion fish ",
    "psd-run --aggregation e": "psd-run --aggregation exact ",
    "psd-run --shards 2 ./tra": "psd-run --shards 2 ./train.py ",
    "psd-server --log-level w": "psd-server --log-level warning ",
    "psdctl kick --js": "psdctl kick --json ",
    "psdctl jo": "psdctl jobs ",
    "psdctl drain --jo": "psdctl drain --job ",
}
"""What is typed, then tab -> the line."""

START = {
    "bash": 'source ./script; bind -x \'"\\C-x": echo "<$READLINE_LINE>"; READLINE_LINE=\'\n',
    "zsh": "fpath+=($PWD); autoload -Uz compinit; compinit -u -D\n"
    "show() { print -r -- \"<$BUFFER>\"; zle kill-whole-line }; zle -N show; bindkey '^X' show\n",
}
"""Makes the shell know the script, as psdctl completion --help says, and a key that prints the line and clears it."""


@pytest.fixture
def shell(request, tmp_path, capsys, monkeypatch):
    """A shell's name and path, in a directory with its script; skips where it is not installed."""
    path = shutil.which(request.param)
    if path is None:
        pytest.skip(f"{request.param} is not installed")
    assert main(["completion", request.param]) == 0
    (tmp_path / ("_psdctl" if request.param == "zsh" else "script")).write_text(capsys.readouterr().out)
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    for name, value in {"HOME": str(tmp_path), "TERM": "dumb", "COLUMNS": "200", "PS1": ""}.items():
        monkeypatch.setenv(name, value)
    return request.param, path


@pytest.mark.parametrize("shell", ["bash", "zsh"], indirect=True)
def test_the_tab_key_completes_the_words_of_all_three_programs_in_any_order(shell):
    name, path = shell
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(path, [path, *(["--norc", "--noprofile"] if name == "bash" else ["-f"]), "-i"])

    def shown_until(end):
        text = b""
        while end not in text:
            text += os.read(terminal, 4096)
        return text.decode()

    try:
        os.write(terminal, (START[name] + "echo rea''dy\n").encode())
        shown_until(b"ready")
        for line, completed in TYPED.items():
            os.write(terminal, f"{line}\t\x18".encode())
            shown = shown_until(b">").rpartition("<")[2].partition(">")[0]
            assert shown == completed
        os.write(terminal, b"exit\n")
    finally:
        os.close(terminal)
        os.waitpid(pid, 0)


@pytest.mark.parametrize("shell", ["fish"], indirect=True)
def test_fish_completes_the_words_of_all_three_programs(shell):
    """Its own command says what it would make of a line."""
    _, path = shell
    for line, completed in TYPED.items():
        text = f"source ./script; complete -C '{line}' | cut -f1"
        found = subprocess.run([path, "-c", text], capture_output=True, text=True, timeout=100, check=True)
        assert found.stdout.split() == completed.split()[-1:]
