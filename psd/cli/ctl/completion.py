"""`psdctl completion`: scripts with which a shell completes the arguments of psdctl, psd-run and psd-server.

The scripts are made from the commands' own parsers, so they know every option and run no program. Must not know what options
mean: values from a fixed list are completed, and all others are left to the shell, as names of files.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from psd.cli.words import arguments
from psd.cli.words.arguments import EXIT_OK, Commands, Parser

_DESCRIPTION = """\
Print a script by which bash, zsh or fish completes commands and options of psdctl, psd-run and psd-server."""

_EPILOG = """\
examples:
  psdctl completion bash > ~/.local/share/bash-completion/completions/psdctl     then in a new shell
  source <(psdctl completion bash)                                               in this one
  psdctl completion zsh > ~/.zfunc/_psdctl           with fpath+=(~/.zfunc) before compinit in ~/.zshrc
  psdctl completion fish > ~/.config/fish/completions/psdctl.fish

exit status:
  0     printed
  2     the options are wrong"""


@dataclass(frozen=True)
class OptionWords:
    """An option: its names, the start of its help, and its value.

    Attributes:
        choices: the allowed values; None: any. takes_value: True if a value follows the option.
    """

    names: tuple[str, ...]
    help: str
    takes_value: bool
    choices: tuple[str, ...] | None


def options_of(parser: argparse.ArgumentParser) -> Iterator[OptionWords]:
    """The options of a parser, in the order of its help."""
    for action in parser._actions:  # noqa: SLF001 - argparse has no public list of them
        if action.option_strings:
            text = re.split(r"[;:.(]", (action.help or "").replace("%(default)s", "").replace("%%", "%"))[0].strip()
            choices = tuple(map(str, action.choices)) if action.choices is not None else None
            yield OptionWords(tuple(action.option_strings), text, action.nargs != 0, choices)


def values_of(parser: argparse.ArgumentParser) -> list[str]:
    """The values of positional arguments that have choices."""
    found = (action.choices for action in parser._actions if not action.option_strings)  # noqa: SLF001
    return [str(choice) for choices in found if choices is not None for choice in choices]


Programs = Mapping[str, Mapping[str, argparse.ArgumentParser]]
"""Parsers by program and command; for a program without commands, the command is the empty string."""


def _word(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def bash(programs: Programs) -> str:
    """The script for bash."""
    return "\n".join(
        f"""_{name.replace("-", "_")}() {{
{_bash_body(commands)}
}}
complete -o default -F _{name.replace("-", "_")} {name}
"""
        for name, commands in programs.items()
    )


def _bash_body(commands: Mapping[str, argparse.ArgumentParser]) -> str:
    cases = {command: _bash_case(parser) for command, parser in commands.items()}
    lines = ["  local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]} words= values="]
    lines.append("  if [[ $prev == = ]]; then prev=${COMP_WORDS[COMP_CWORD-2]}; elif [[ $cur == = ]]; then cur=; fi")
    if "" in commands:
        lines.append(cases[""])
    else:
        first = _word(" ".join([*commands, "--help", "--version"]))
        lines.append(f"  if ((COMP_CWORD == 1)); then words={first}; else case ${{COMP_WORDS[1]}} in")
        lines += [f"  {command})\n{case};;" for command, case in cases.items()]
        lines.append("  esac; fi")
    lines.append("  if [[ -n $values ]]; then words=$values; fi")
    lines.append('  mapfile -t COMPREPLY < <(compgen -W "$words" -- "$cur")')
    return "\n".join(lines)


def _bash_case(parser: argparse.ArgumentParser) -> str:
    options = list(options_of(parser))
    words = " ".join([*(name for option in options for name in option.names), *values_of(parser)])
    lines = [f"  words={_word(words)}", "  case $prev in"]
    for option in options:
        if option.takes_value:  # of a value that may be any there are no words, and so bash takes files
            choices = f"values={_word(' '.join(option.choices))}" if option.choices is not None else "words="
            lines.append(f"  {'|'.join(option.names)}) {choices};;")
    return "\n".join([*lines, "  esac"])


def zsh(programs: Programs) -> str:
    """The script for zsh. zsh calls a function with the name of the script's file, so the functions in it have other names."""
    parts = ["#compdef " + " ".join(programs)]
    for name, commands in programs.items():
        parts.append(f"_words_of_{name.replace('-', '_')}() {{")
        if "" in commands:
            parts.append("  " + _zsh_arguments(commands[""]))
        else:
            parts += [
                "  if ((CURRENT == 2)); then",
                f"    compadd -- {' '.join(commands)} --help --version",
                "    return",
                "  fi",
            ]
            parts += ["  local command=$words[2]", "  shift words", "  ((CURRENT--))", "  case $command in"]
            parts += [f"  {command}) {_zsh_arguments(parser)};;" for command, parser in commands.items()]
            parts.append("  esac")
        parts.append("}")
    functions = " ".join(f"{name}) _words_of_{name.replace('-', '_')};;" for name in programs)
    return "\n".join([*parts, f"case $service in {functions} esac", ""])


def _zsh_arguments(parser: argparse.ArgumentParser) -> str:
    words = []
    for option in options_of(parser):
        text = re.sub(r"([\[\]:\\])", r"\\\1", option.help)
        choices = f"({' '.join(option.choices)})" if option.choices is not None else "_files"
        for name in option.names:  # the value is the next word, or follows an equals sign
            value = f":value:{choices}" if option.takes_value else ""
            words.append(_word(f"*{name}{'=' if value and name.startswith('--') else ''}[{text}]{value}"))
    values = values_of(parser)
    rest = f"*:value:({' '.join(values)})" if values else "*:file:_files"
    return " ".join(["_arguments", *words, _word(rest)])


def fish(programs: Programs) -> str:
    """The script for fish."""
    lines = []
    for name, commands in programs.items():
        for command, parser in commands.items():
            when = f"-n {_word(f'__fish_seen_subcommand_from {command}')} " if command else ""
            if command:
                lines.append(f"complete -c {name} -f -n __fish_use_subcommand -a {command}")
            lines += [f"complete -c {name} {when}{_fish_option(option)}" for option in options_of(parser)]
            if values := values_of(parser):
                lines.append(f"complete -c {name} -f {when}-a {_word(' '.join(values))}")
    return "\n".join([*lines, ""])


def _fish_option(option: OptionWords) -> str:
    words = [f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in option.names]
    if option.takes_value:
        words.append(f"-x -a {_word(' '.join(option.choices))}" if option.choices is not None else "-r")
    return " ".join([*words, "-d", _word(option.help)])


_SHELLS: dict[str, Callable[[Programs], str]] = {"bash": bash, "zsh": zsh, "fish": fish}


def add_command(commands: Commands, others: Callable[[], Mapping[str, argparse.ArgumentParser]]) -> None:
    """Add `completion` to psdctl. It completes all commands that `commands` has when it runs, including those added later.

    Args:
        others: returns the parsers of the other programs, by name.
    """
    parser = arguments.add_command(commands, "completion", "|".join(_SHELLS), _DESCRIPTION, _EPILOG)
    parser.add_argument_group("for which shell").add_argument("shell", choices=_SHELLS, help="bash, zsh or fish")

    def run(args: argparse.Namespace) -> int:
        own: Mapping[str, Parser] = commands.choices
        programs: Programs = {"psdctl": own, **{name: {"": other} for name, other in others().items()}}
        print(_SHELLS[args.shell](programs), end="")
        return EXIT_OK

    parser.finish(run)
