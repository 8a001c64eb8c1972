"""psd-server --relay-of: a process that follows a job's shards, or other relays, and serves its readers.

Makes the settings from flags, serves, and makes an exit status from signals. The main thread sleeps until a signal comes, or
the thread that drains is done. Knows only the life cycle of RelayServer (start, drain), nothing of gRPC or of versions.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace

from psd.cli.processes import descriptor_limit, malloc
from psd.cli.processes.own_arguments import hide_secrets
from psd.cli.processes.wakeup_pipe import FIRST_WORD, Wakeups
from psd.cli.words import logs
from psd.cli.words.arguments import (
    CREDENTIAL_OPTIONS,
    EXIT_FAILURE,
    EXIT_OK,
    SERVER_DEFAULTS,
    Parser,
    add_options,
    exit_status,
    signal_name,
    values,
    whole_number,
)
from psd.cli.words.terminal import discard, prepare_streams
from psd.contract.config import LIMITS, SECURITY, WATCHING, ClientConfig, ConfigError, Limits, ServerConfig
from psd.contract.environment import client_config
from psd.contract.errors import PsdError
from psd.contract.settings import settings_of

FLAG = "--relay-of"

READS_MAX = 1000
"""Calls of readers at a time, by default. One costs a thread, and a block's memory while it is sent."""

UPSTREAM_RETRY_S = 5.0
"""Seconds for which a call to the servers is tried again before the relay says that they are lost. It goes on trying."""

DRAIN_SLACK_S = 5.0
"""Seconds beyond the grace to cut off calls and end threads. If a drain takes longer, that is a defect."""

DESCRIPTORS_BESIDE = 256

_DRAINED, _FAILED = range(FIRST_WORD, FIRST_WORD + 2)

_PLACE = ("listen", "advertise", "health_port", "grace_s")
_SECURITY = settings_of(ServerConfig, SECURITY)
_WATCHING = settings_of(ServerConfig, WATCHING)
_LIMITS = ("readers_max", "keep_versions")

USAGE = "psd-server --relay-of SERVERS [options]"

_DESCRIPTION = """\
Serve the readers of a job in place of its shards: follow these, fetch each new version of the parameters once,
and hand it out as often as it is asked for. A relay keeps nothing: it may be killed and started anywhere.
Relays may follow relays, in chains and trees."""

_EPILOG = """\
examples:
  psd-server --relay-of 10.0.0.1:7000,10.0.0.2:7000 --listen 0.0.0.0:7100 --insecure
                                         a relay of a job with two shards, whose addresses are given in their order
  psd-server --relay-of '10.0.0.8:7100|10.0.0.9:7100' --listen 127.0.0.1:7100
                                         a relay of either of two relays: if one is lost it follows the other
  psdctl status --servers 127.0.0.1:7100
                                         what a relay follows, its version and its age

When the relay listens it prints one line on standard output:
  psd-server: relay of SERVERS ready at 127.0.0.1:7100
Its gRPC health status is SERVING then, and that of the name psd.ready once it has a version.

Readers give its address in place of the shards', or several, of which they use one at a time:
  psd_client.connect("10.0.0.8:7100|10.0.0.9:7100", role="reader")
A relay is one address for the whole job, however many shards that has. It has tensors; rows of tables and
server-side vectors are read from the shards. Whatever changes the job it refuses.

A version on a relay never goes back. If its servers are lost, it serves what it has, and its log and psdctl
status say since when; if the job goes back to a checkpoint, it waits until the job is beyond its version.

With --token-file and --tls-cert it admits its readers as a shard would. What it shows its own servers is told by
--upstream-..., or by PSD_TLS_CA, PSD_TLS_CERT, PSD_TLS_KEY and PSD_TOKEN_FILE; a reader's token suffices.

SIGTERM, SIGINT or SIGHUP (without nohup) ends it within --grace: waiting readers go to their next address at
once, and those that are being served may finish. A second signal ends it at once.

exit status:
  0     ended by a signal
  1     failed: the address cannot be bound, a file of certificates or tokens cannot be used, or the end does not come
  2     the options are wrong
  130   ended at once by a second SIGINT (128 + the signal's number; 143 for SIGTERM)"""


def is_asked(argv: Sequence[str]) -> bool:
    """True if these arguments of psd-server ask for a relay."""
    return any(word == FLAG or word.startswith(f"{FLAG}=") for word in argv)


def parser() -> Parser:
    """The parser of a relay's arguments."""
    found = Parser("psd-server", USAGE, _DESCRIPTION, _EPILOG)
    place = found.add_argument_group("what to follow, and where to serve")
    place.add_argument(
        FLAG,
        required=True,
        metavar="SERVERS",
        help="addresses of the job's shards in their order, separated by commas; or of a relay; A|B: of either",
    )
    place.add_argument("--shard", help="not together with this: a relay has the blocks of all shards")
    settings = settings_of(ServerConfig)
    add_options(place, {name: settings[name] for name in _PLACE}, SERVER_DEFAULTS)
    place.add_argument("--run-id", default="", metavar="NAME", help="follow only the job of this name (default: the one found)")
    place.add_argument(
        "--max-reads",
        dest="reads_max",
        type=whole_number,
        default=READS_MAX,
        metavar="N",
        help="readers that wait or fetch at a time, further ones are refused; one that is slow keeps its version in memory "
        "(default: %(default)s)",
    )
    limits = settings_of(Limits, LIMITS)
    add_options(place, {name: limits[name] for name in _LIMITS}, vars(Limits()))
    add_options(found.add_argument_group("security of its readers (files are read again when they change)"), _SECURITY, {})
    upstream = found.add_argument_group("security of what it follows")
    add_options(upstream, {f"upstream_{name}": option for name, option in CREDENTIAL_OPTIONS.items()}, {})
    add_options(found.add_argument_group(WATCHING), settings_of(ServerConfig, WATCHING), SERVER_DEFAULTS)
    logs.add_options(found)
    found.add_information()
    return found


def parse(argv: Sequence[str] | None) -> tuple[ServerConfig, ClientConfig, logs.Settings]:
    """The configuration as of the job's only shard, that of a reader of the servers, and the log settings.

    A wrong option ends the process with status 2 and one line of explanation.
    """
    given = parser()
    args = given.parse_args(argv)
    if args.shard is not None:
        given.error(f"--shard: a relay has the blocks of all shards; give either --shard or {FLAG}")
    try:
        limits = Limits(reads_max=args.reads_max, **values(args, _LIMITS))
        limits = replace(limits, calls=limits.reads_max + 576, connections=2 * limits.reads_max + 64)
        config = ServerConfig(0, 1, **values(args, ("run_id", *_PLACE, *_SECURITY, *_WATCHING)), limits=limits)
        upstream = client_config(
            servers=args.relay_of,
            rank=0,
            world_size=1,
            run_id=config.run_id,
            transport="grpc",
            retry_timeout=UPSTREAM_RETRY_S,
            report_after=86_400,
            **{name: getattr(args, f"upstream_{name}") for name in CREDENTIAL_OPTIONS},
        )
    except ConfigError as error:
        text = str(error)
        given.error(f"{FLAG}: {text.partition(': ')[2]}" if text.startswith("servers: ") else text)
    return config, upstream, logs.Settings(args.log_level, is_json=args.log_json)


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until told to end; returns the exit status."""
    prepare_streams()
    hide_secrets()
    config, upstream, log_settings = parse(argv)
    with Wakeups([signal.SIGTERM, signal.SIGINT, signal.SIGHUP]) as wakeups:
        say = logs.configure("psd-server", log_settings, shard=0)
        malloc.keep_freed_memory()
        descriptor_limit.allow(config.limits.connections_max + DESCRIPTORS_BESIDE)
        os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
        # Only here: gRPC takes a while to load, and wrong options should be reported at once.
        from psd.relay.server import RelayServer

        try:
            server = RelayServer(config, upstream)
            server.start()
        except (OSError, ConfigError, PsdError) as error:
            say(f"psd-server: error: {error}")
            return EXIT_FAILURE
        name = f"psd-server: relay of {','.join(upstream.servers)}"
        try:
            print(f"{name} ready at {server.address}", flush=True)
        except OSError as error:  # whoever wants to know can ask for its health
            say(f"psd-server: cannot write to standard output: {error.strerror}; serving all the same")
            discard(sys.stdout)
        while not (heard := wakeups.wait()):
            pass
        first, *more = heard
        say(f"{name} got {signal_name(first)}: ending within {config.grace_s:g} s; a second signal ends it at once")

        def drain() -> None:
            try:
                server.drain(config.grace_s)
                wakeups.send(_DRAINED)
            finally:
                wakeups.send(_FAILED)  # read only if nothing came before; the traceback is threading's

        threading.Thread(target=drain, daemon=True).start()
        give_up_at = time.monotonic() + config.grace_s + DRAIN_SLACK_S
        while not more:
            left_s = give_up_at - time.monotonic()
            if left_s <= 0:
                say(f"{name}: error: the drain does not end; ending at once")
                os._exit(EXIT_FAILURE)
            more = wakeups.wait(left_s)
        if more[0] < FIRST_WORD:
            say(f"{name} got {signal_name(more[0])}: ending at once")
            os._exit(exit_status(more[0]))  # no clean-up that could wait for anything
        say(f"{name} {server.totals}")
        return EXIT_OK if more[0] == _DRAINED else EXIT_FAILURE
