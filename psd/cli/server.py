"""psd-server: one process, one shard. Makes a ServerConfig from flags, serves, and makes an exit status from signals.

The main thread sleeps until something wakes it that can end the process: a signal, the thread that watches for the end of the
job, or the thread that drains. So one thread takes all decisions, in order, and a second signal is noticed while the drain for
the first one is still under way.

Knows only the life cycle of ShardServer (start, done, drain), nothing of gRPC or of the state behind it.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, NoReturn

from psd.cli import relay
from psd.cli.processes import descriptor_limit, malloc
from psd.cli.processes.garbage import end_without_search
from psd.cli.processes.own_arguments import hide_secrets
from psd.cli.processes.wakeup_pipe import FIRST_WORD, Wakeups
from psd.cli.words import logs
from psd.cli.words.arguments import (
    EXIT_CHECKPOINT,
    EXIT_FAILURE,
    EXIT_OK,
    EXIT_STATE_LOST,
    LAST_CHECKPOINT_SIGNAL,
    SERVER_DEFAULTS,
    Parser,
    add_options,
    add_settings,
    exit_status,
    signal_name,
    values,
)
from psd.cli.words.terminal import discard, prepare_streams
from psd.contract.config import (
    CHECKPOINTS,
    END,
    JOB,
    LIMITS,
    PLACE,
    SECURITY,
    WATCHING,
    ConfigError,
    Limits,
    ServerConfig,
    parse_shard,
)
from psd.contract.environment import crash_point
from psd.contract.errors import PsdError
from psd.contract.launching import HAS_ALL_STORED, HAS_STORED
from psd.contract.settings import settings_of

if TYPE_CHECKING:
    from psd.rim.server import ShardServer

FINAL_CHECKPOINT_S_MAX = 3600.0
"""Seconds to store the parameters of a job that is done. Only a store that does not answer takes as long."""

STORE_PATIENCE_S = 5.0
"""Seconds after which the log says that the start is still busy reading the shard's files, or trying the checkpoint place."""

DONE_GRACE_S = 1.0
"""Grace in seconds after the last worker has left, when only its own last reply and a psdctl can still be under way."""

DRAIN_SLACK_S = 5.0
"""Seconds beyond the grace to cut off calls and end threads. If a drain takes longer, that is a defect."""

DESCRIPTORS_PER_WORKER, DESCRIPTORS_BESIDE = 4, 1024
"""Descriptors to ask for: more than the number of connections that the server accepts."""

_STARTED, _DONE, _DRAINED, _FAILED, _ALONE = range(FIRST_WORD, FIRST_WORD + 5)  # what the threads say to the main one

_USAGE = f"psd-server --shard INDEX/COUNT [options]\n       {relay.USAGE}"

_DESCRIPTION = """\
Serve one shard of a training job: hold its part of the parameters, add up the workers' gradients,
apply the optimizer, and hand the parameters out. A job has COUNT shards, each a process like this one;
workers are told all addresses, in the order of the shards (PSD_SERVERS). With --relay-of the process
serves the readers of a job instead, in place of its shards: psd-server --relay-of SERVERS --help explains."""

_EPILOG = """\
examples:
  psd-server --shard 0/1                          a job with a single shard, on 127.0.0.1:7000
  psd-server --shard 0/2 --listen 0.0.0.0:7000 --tls-cert tls.crt --tls-key tls.key --token-file tokens
                                                  the first of two, reachable from other machines
  psd-server --shard 1/2 --listen 127.0.0.1:0     the second, on any free port (the ready line says which)
  psd-server --shard 0/1 --run-id mine --state-dir /dev/shm/mine-0
                                                  one that may be killed: the same command continues where it was

When the shard serves, it prints one line on standard output, and its gRPC health status is SERVING:
  psd-server: shard 0/2 ready at 127.0.0.1:7000

SIGTERM, SIGINT or SIGHUP (without nohup) drains it, within --grace: with --checkpoint-dir it takes a last
checkpoint, for half of that time while workers train; then new requests are refused, waiting ones end with
the error Draining, and running ones may finish. If the workers did not train up to the checkpoint, shards
that end together store what they hold, if that is of one round. A second signal ends it at once. SIGUSR1 says
that the job is about to end: the shard takes the last checkpoint at once, says so, and serves on.

Without --state-dir the parameters are gone when the process ends. With it they stay, even after kill -9,
and the same command continues with them: workers wait for the shard and repeat unanswered requests. They
are removed when all workers have left (--exit-when-done). If DIR is on a disk, they also survive a reboot
after the shard has ended in order. After a crash of the machine they are not used: the shard starts from
a checkpoint, or, without --checkpoint-dir, not at all.

Without --token-file anybody who reaches the port can train, read the model, or end the job; without TLS
anybody on the network path can read and change everything, tokens included. So listening beyond this machine
requires TLS, or --insecure. A token file has lines such as
  worker 3f786850e387550fdab836ed7e6dc881      what training needs
  reader 89e6c98d92887913cadf06b2adb97f26      describe, status, read
  admin  fac1ba4e4b1b2dc7a3e6a3e9d6a5b1c0      everything, also checkpoints and orders by psdctl
A role may have several lines, so that tokens can be changed. A client's own token is in a file of its own,
named by PSD_TOKEN_FILE.

exit status:
  0     drained after a signal, or done (--exit-when-done)
  1     failed: the address cannot be bound, --state-dir holds something else or is damaged,
        --state-dir or --checkpoint-dir cannot be written to, a --rule cannot be imported, a file of certificates or
        tokens cannot be used, the drain does not end, or a defect, with a traceback
  2     the options are wrong
  65    ended in order, but nobody can continue with what is in --state-dir: a round of exact aggregation was lost
        when a shard and workers were killed, and there is no checkpoint
  74    ended in order, but the latest checkpoint could not be stored
  130   ended at once by a second SIGINT (128 + the signal's number; 143 for SIGTERM)"""


def parser() -> Parser:
    """The parser of psd-server's arguments."""
    found = Parser("psd-server", _USAGE, _DESCRIPTION, _EPILOG)
    place = found.add_argument_group(PLACE)
    place.add_argument("--shard", required=True, metavar="INDEX/COUNT", help="which of how many shards, from 0: 0/4 to 3/4")
    add_options(place, settings_of(ServerConfig, PLACE), SERVER_DEFAULTS)
    for group in (JOB, CHECKPOINTS, END, SECURITY):
        add_settings(found, group)
    add_options(found.add_argument_group(LIMITS), settings_of(Limits), vars(Limits()))
    logs.add_options(found)
    add_settings(found, WATCHING)
    found.add_information()
    return found


def parse(argv: Sequence[str] | None) -> tuple[ServerConfig, logs.Settings]:
    """The configuration and the log settings. A wrong option ends the process with status 2 and one line of explanation."""
    given = parser()
    args = given.parse_args(argv)
    args.rules = tuple(args.rules)
    try:
        limits = Limits(**values(args, settings_of(Limits)))
        config = ServerConfig(*parse_shard(args.shard), **values(args, settings_of(ServerConfig)), limits=limits)
    except ConfigError as error:
        given.error(str(error))
    return config, logs.Settings(args.log_level, is_json=args.log_json)


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until told to end; returns the exit status."""
    if relay.is_asked(sys.argv[1:] if argv is None else argv):
        return relay.main(argv)
    prepare_streams()
    end_without_search()
    hide_secrets()
    config, log_settings = parse(argv)
    with Wakeups([signal.SIGTERM, signal.SIGINT, signal.SIGHUP, LAST_CHECKPOINT_SIGNAL]) as wakeups:
        if config.exit_on_eof and not config.heeds_launcher:
            threading.Thread(target=_watch_input, args=(wakeups,), daemon=True).start()
        say = logs.configure("psd-server", log_settings, shard=config.shard_index)
        malloc.keep_freed_memory()
        descriptor_limit.allow(DESCRIPTORS_PER_WORKER * config.limits.workers_max + DESCRIPTORS_BESIDE)

        os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # or each stranger's handshake that fails writes to the log
        patience = threading.Timer(
            STORE_PATIENCE_S, say, ["psd-server: still reading --state-dir, or trying or reading --checkpoint-dir"]
        )
        patience.daemon = True
        if config.checkpoint_dir or config.state_dir:
            patience.start()
        try:
            server, heard = _start(config, wakeups, say)
        except (OSError, ConfigError, PsdError) as error:
            say(f"psd-server: error: {error}")
            return EXIT_FAILURE
        finally:
            patience.cancel()
        try:
            print(f"psd-server: shard {config.shard_index}/{config.shard_count} ready at {server.address}", flush=True)
        except OSError as error:  # whoever wants to know can ask for its health
            say(f"psd-server: cannot write to standard output: {error.strerror}; serving all the same")
            discard(sys.stdout)
        if config.heeds_launcher:
            threading.Thread(target=_heed, args=(server, config, wakeups), daemon=True).start()
        return _serve(server, config, wakeups, heard, say)


def _watch_input(wakeups: Wakeups) -> None:
    while os.read(0, 4096):
        pass
    wakeups.send(_ALONE)


def _heed(server: ShardServer, config: ServerConfig, wakeups: Wakeups) -> None:
    """Read from the launcher which workers it restarts, until it ends. Other lines are ignored."""
    for line in sys.stdin:
        if found := re.fullmatch(r"(starting|gone) (\d{1,9})\n", line):
            server.shard.expect_worker(int(found[2]), will_come=found[1] == "starting")
    if config.exit_on_eof:
        wakeups.send(_ALONE)


def _start(config: ServerConfig, wakeups: Wakeups, say: Callable[[str], None]) -> tuple[ShardServer, list[int]]:
    """Start the server in a separate thread, because a store may never answer; return it, and the events of the meantime.

    Raises:
        OSError, ConfigError, PsdError: the server cannot be started.
    """
    # Only here: gRPC takes a while to load, and wrong options should be reported at once.
    from psd.rim.server import ShardServer

    started: Future[ShardServer] = Future()

    def start() -> None:
        try:
            server = ShardServer(config, crash_point=crash_point())
            server.start()
            started.set_result(server)
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            started.set_exception(error)
        wakeups.send(_STARTED)

    threading.Thread(target=start, daemon=True).start()
    heard: list[int] = []
    is_told = False
    while _STARTED not in heard:
        heard += wakeups.wait()
        signums = [word for word in heard if word < FIRST_WORD and word != LAST_CHECKPOINT_SIGNAL]
        if len(signums) > 1:
            _end_at_once(signums[1], config, say)
        if signums and not is_told:
            is_told = True
            say(f"{_name(config)} got {signal_name(signums[0])}: draining when it has started; a second signal ends it at once")
    return started.result(), [word for word in heard if word != _STARTED]


def _name(config: ServerConfig) -> str:
    return f"psd-server: shard {config.shard_index}/{config.shard_count}"


def _end_at_once(signum: int, config: ServerConfig, say: Callable[[str], None]) -> NoReturn:
    say(f"{_name(config)} got {signal_name(signum)}: ending at once")
    os._exit(exit_status(signum))  # no clean-up that could wait for anything


def _serve(server: ShardServer, config: ServerConfig, wakeups: Wakeups, heard: list[int], say: Callable[[str], None]) -> int:
    """Wait for the first reason to end, drain, and return the exit status. heard: events that have come before."""
    name = _name(config)

    def watch() -> None:
        server.done.wait()
        wakeups.send(_DONE)

    def drain() -> None:
        try:
            server.drain(grace_s, on_stored)
            wakeups.send(_DRAINED)
        finally:
            wakeups.send(_FAILED)  # read only if nothing came before; the traceback is threading's

    said: list[str] = []

    def on_stored() -> None:
        is_last = server.last_checkpoint and not server.done.is_set()
        if not is_last:
            say(f"{name} {HAS_ALL_STORED}")
        elif server.last_checkpoint not in said:
            say(f"{name} {HAS_STORED}: {server.last_checkpoint}")

    if config.exit_when_done:
        threading.Thread(target=watch, daemon=True).start()

    def take_last_checkpoint() -> None:
        try:
            server.take_last_checkpoint(config.grace_s)
            said.append(server.last_checkpoint)
            say(f"{name} {HAS_STORED}: {server.last_checkpoint}")
        except PsdError as error:
            say(f"{name} takes no checkpoint while workers train: {error}")

    taking = threading.Thread(target=take_last_checkpoint, daemon=True)
    while not (words := [word for word in heard if word != LAST_CHECKPOINT_SIGNAL]):
        if heard and taking.ident is None:
            server.expect_end()
            taking.start()
        heard = wakeups.wait()
    if LAST_CHECKPOINT_SIGNAL in heard:  # and more, at once
        server.expect_end()
    first, *more = words
    grace_s = config.grace_s
    give_up_at = time.monotonic() + grace_s + DRAIN_SLACK_S
    if first == _DONE:
        grace_s = min(grace_s, DONE_GRACE_S)
        if config.checkpoint_dir:
            give_up_at += FINAL_CHECKPOINT_S_MAX
        say(f"{name} done: all workers have left")
    elif first == _ALONE:
        grace_s, give_up_at = 0.0, time.monotonic() + DRAIN_SLACK_S
    else:
        say(f"{name} got {signal_name(first)}: draining for at most {grace_s:g} s; a second signal ends it at once")

    if first != _ALONE:
        say(f"{name} {server.totals}")
    threading.Thread(target=drain, daemon=True).start()
    more = [word for word in more if word not in (_DONE, _ALONE)]
    while not more:
        left_s = give_up_at - time.monotonic()
        if left_s <= 0:
            say(f"{name}: error: the drain does not end; ending at once")
            os._exit(EXIT_FAILURE)
        # During a drain the last worker may leave, or standard input end.
        more = [word for word in wakeups.wait(left_s) if word not in (_DONE, _ALONE, LAST_CHECKPOINT_SIGNAL)]
    second = more[0]
    if second < FIRST_WORD:
        _end_at_once(second, config, say)
    if second == _DRAINED and server.has_failed_to_store:
        return EXIT_CHECKPOINT
    if second == _DRAINED and first != _DONE and (why := server.shard.cannot_go_on):
        say(f"{name}: error: nobody can continue with its parameters: {why}")
        return EXIT_STATE_LOST
    return EXIT_OK if second == _DRAINED else EXIT_FAILURE


if __name__ == "__main__":
    sys.exit(main())
