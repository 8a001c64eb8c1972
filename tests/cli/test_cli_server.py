"""psd-server as a process: options, the ready line, drains, exit statuses."""

import json
import os
import platform
import re
import resource
import threading
from signal import SIGHUP, SIGINT, SIGTERM, raise_signal

import grpc
import pytest
from certificates import Authority
from grpc_health.v1 import health_pb2, health_pb2_grpc

from psd.cli.processes import descriptor_limit, malloc
from psd.cli.processes.wakeup_pipe import Wakeups
from psd.cli.server import _start, main, parse
from psd.contract.config import ConfigError, ServerConfig
from psd.contract.launching import READY_PATTERN
from psd.rim.server import ShardServer
from psd.v1 import control_pb2, control_pb2_grpc


def ready(start, *options):
    """A psd-server on a free port, and its address."""
    server = start("psd.cli.server", "--shard", "0/1", "--listen", "127.0.0.1:0", *options)
    return server, server.line(READY_PATTERN)[3]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "the following arguments are required: --shard"),
        (["--shard", "4/4"], "--shard: expected INDEX/COUNT with INDEX below COUNT, such as 0/4, got '4/4'"),
        (["--shard", "0/1", "--listen", "nowhere"], "--listen: expected HOST:PORT"),
        (["--shard", "0/1", "--lease", "0"], "--lease: expected 0.1 to 86400 seconds, got 0"),
        (["--shard", "0/1", "--lease", "soon"], "--lease: expected seconds, such as 10 or 0.5, got 'soon'"),
        (["--shard", "0/1", "--max-workers", "0"], "--max-workers: expected 1 to 100000, got 0"),
        (["--shard", "0/1", "--checkpoint-steps", "100"], "--checkpoint-dir: not given"),
        (["--shard", "0/1", "--checkpoint-dir", "d", "--checkpoint-secs", "-1"], "--checkpoint-secs: expected 0 to"),
        (["--shard", "0/1", "--checkpoint-dir", "d", "--checkpoint-steps", "-1"], "--checkpoint-steps: expected 0 to"),
        (["--shard", "0/1", "--checkpoint-dir", "d", "--checkpoint-keep", "0"], "--checkpoint-keep: expected 1 to 1000000"),
        (["--shard", "0/1", "--rule", "my rule"], "--rule: expected the import path of a class, such as my_package.my_module"),
        (["--shard", "0/1", "--metrics-port", "65536"], "--metrics-port: expected 0 to 65535, got 65536"),
        (["--shard", "0/1", "--max-work", "1"], "unrecognized arguments: --max-work"),
        (["--shard", "0/1", "--max-name-bytes", "0"], "--max-name-bytes: expected 1 to 4096, got 0"),
        (["--shard", "0/1", "--tls-cert", "c"], "--tls-key: not given; a certificate and its key belong together"),
        (["--shard", "0/1", "--tls-key", "k"], "--tls-cert: not given; a certificate and its key belong together"),
        (["--shard", "0/1", "--tls-client-ca", "ca"], "--tls-client-ca: asks clients for certificates, which needs TLS"),
        (
            ["--shard", "0/1", "--listen", "0.0.0.0:7000"],
            "--listen: 0.0.0.0:7000 is reachable from other machines, and without TLS",
        ),
        (["--shard", "0/1", "--listen", "[::]:7000"], "--listen: [::]:7000 is reachable from other machines"),
        (["--shard", "0/1", "--listen", "host-a:7000", "--token-file", "t"], "or --insecure if the network"),
    ],
)
def test_main_when_an_option_is_wrong_then_one_line_says_what_was_expected(options, message, refusal):
    error = refusal(main, options)

    assert error.startswith("psd-server: error: ")
    assert message in error


def test_main_when_asked_for_help_then_it_explains_exit_statuses(help_of):
    help_ = help_of(main)

    assert "examples:" in help_
    assert "exit status:" in help_


def test_parse_when_all_options_are_given_then_the_configuration_has_them():
    options = (
        "--shard 1/4 --listen 0.0.0.0:0 --advertise host:7001 --run-id r --lease 3 --grace 2 --exit-when-done --max-workers 5 "
        "--max-tensors 6 --max-elements 7 --max-message-bytes 8388608 --log-level error --log-json --state-dir /state "
        "--checkpoint-dir s3://bucket/run --checkpoint-secs 60 --checkpoint-steps 1000 --checkpoint-keep 2 "
        "--rule mine:A --rule mine:B --rule-dir /rules --tls-cert c --tls-key k --tls-client-ca ca --token-file t --insecure "
        "--max-tables 13 --max-table-dim 14 --max-table-bytes 15 --max-table-rows 16 --max-push-ids 17 --max-push-bytes 18 "
        "--max-vectors 20 --max-vector-bytes 21 --max-batch-operations 22 --max-batch-bytes 2097152 "
        "--max-name-bytes 9 --max-calls 10 --max-connections 11 --max-streams 12 --metrics-port 0"
    )

    config, log = parse(options.split())

    assert (config.shard_index, config.shard_count, config.listen, config.advertise) == (1, 4, "0.0.0.0:0", "host:7001")
    assert (config.run_id, config.lease_s, config.grace_s, config.exit_when_done) == ("r", 3, 2, True)
    assert (config.state_dir, config.checkpoint_dir, config.checkpoint_secs) == ("/state", "s3://bucket/run", 60)
    assert (config.checkpoint_steps, config.checkpoint_keep) == (1000, 2)
    assert (config.rules, config.rule_dir) == (("mine:A", "mine:B"), "/rules")
    limits = config.limits
    assert (limits.workers_max, limits.tensors_max, limits.elements_max, limits.message_bytes_max) == (5, 6, 7, 8 << 20)
    assert (limits.name_bytes_max, limits.calls_max, limits.connections_max, limits.streams_max) == (9, 10, 11, 12)
    assert (limits.tables_max, limits.table_dim_max, limits.table_bytes_max) == (13, 14, 15)
    assert (limits.table_rows_max, limits.push_ids_max, limits.push_bytes_max) == (16, 17, 18)
    assert (limits.vectors_max, limits.vector_bytes_max) == (20, 21)
    assert (limits.batch_operations_max, limits.batch_bytes_max) == (22, 2 << 20)
    assert (config.tls_cert, config.tls_key, config.tls_client_ca, config.token_file) == ("c", "k", "ca", "t")
    assert config.insecure
    assert log == ("error", True)
    assert config.metrics_port == 0


@pytest.mark.parametrize("listen", ["127.0.0.1:7000", "127.8.9.1:0", "localhost:7000", "[::1]:7000"])
def test_parse_when_only_this_machine_is_listened_to_then_no_tls_is_needed(listen):
    assert not parse(["--shard", "0/1", "--listen", listen])[0].insecure


@pytest.mark.parametrize(
    ("name", "data", "mode", "words"),
    [
        ("--token-file", b"worker short", 0o600, ", line 1: a token has 16 to 256 characters"),
        ("--token-file", b"# none", 0o600, ": has no token, so nobody could do anything"),
        ("--token-file", b"\xff", 0o600, " is not ASCII text"),
        ("--token-file", b"worker 0123456789abcdef", 0o606, "all users of this machine can write "),
        ("--tls-cert", b"-----BEGIN CERTIFICATE-----", 0o600, " cannot be used: "),
        ("--tls-cert", b"none", 0o600, " holds no PEM certificate"),
        ("--tls-key", b"none", 0o600, " holds no PEM private key"),
        ("--tls-key", None, 0o600, " cannot read "),
        ("--tls-key", 1, 0o600, " do not belong together"),
        ("--tls-client-ca", b"none", 0o600, " holds no PEM certificates"),
    ],
)
def test_server_when_a_file_is_wrong_then_it_does_not_start_and_names_it(tmp_path, name, data, mode, words):
    pairs = [Authority("a").issue("127.0.0.1") for _ in range(2)]
    paths = {f"--{k.replace('_', '-')}": path for k, path in pairs[0].write(tmp_path, "good").items()}
    wrong = tmp_path / "wrong"
    if data is not None:
        wrong.write_bytes(pairs[1].key if data == 1 else data)
        wrong.chmod(mode)
    flags = [f"{flag}={path}" for flag, path in {**paths, name: wrong}.items()]

    with pytest.raises(ConfigError) as caught:
        ShardServer(parse(["--shard", "0/1", "--listen", "127.0.0.1:0", *flags])[0])

    error = str(caught.value)
    assert name in error
    assert words in error
    assert str(wrong) in error
    assert "0123456789abcdef" not in error


@pytest.mark.process
@pytest.mark.parametrize(("content", "error"), [(None, "ModuleNotFoundError"), ("import nothing_such", "rules_that_fail.py:1")])
def test_server_when_a_rule_cannot_be_imported_then_it_does_not_start(start, content, error, tmp_path):
    if content is not None:
        (tmp_path / "rules_that_fail.py").write_text(content)

    rule = ("--rule", "rules_that_fail:Mine", "--rule-dir", str(tmp_path))
    server = start("psd.cli.server", "--shard", "0/1", "--listen", "127.0.0.1:0", *rule)

    assert server.end() == 1
    assert server.output.startswith("psd-server: error: rule 'rules_that_fail:Mine': cannot be imported: ")
    assert error in server.output
    assert "\n" not in server.output


def test_keep_freed_memory_when_malloc_is_glibcs_then_it_takes_the_thresholds():
    assert malloc.keep_freed_memory() == (platform.libc_ver()[0] == "glibc")


def test_allow_when_the_limit_is_lower_then_it_is_raised_as_far_as_may_be():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
        assert descriptor_limit.allow(300) == 300
        assert descriptor_limit.allow(200) == 300
        assert descriptor_limit.allow(1 << 40) == before[1]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.process
def test_server_when_it_is_to_log_json_then_every_line_of_the_log_is_an_object(start):
    server, _ = ready(start, "--log-json", "--metrics-port", "0")

    server.signal(SIGTERM)

    assert server.end() == 0
    log = [json.loads(line) for line in server.lines if not re.fullmatch(READY_PATTERN, line)]
    assert [line["shard"] for line in log] == [0] * len(log)
    assert re.fullmatch(r"serving metrics at http://127\.0\.0\.1:\d+/metrics", log[0]["message"])
    assert "draining" in log[-2]["message"]
    assert "has served no job" in log[-1]["message"]


def test_server_when_signalled_twice_while_a_store_does_not_answer_then_it_ends_at_once(monkeypatch):
    answers = threading.Event()

    def leave(status):
        answers.set()
        raise SystemExit(status)

    monkeypatch.setattr("psd.rim.server.ShardServer", lambda *_, **__: answers.wait())
    monkeypatch.setattr(os, "_exit", leave)
    said = []
    with Wakeups([SIGTERM]) as wakeups:
        raise_signal(SIGTERM)
        raise_signal(SIGTERM)
        with pytest.raises(SystemExit) as ended:
            _start(ServerConfig(0, 1), wakeups, said.append)
        wakeups.wait()  # for the thread's end
    wakeups._reader.close()
    wakeups._writer.close()

    assert ended.value.code == 128 + SIGTERM
    assert said == ["psd-server: shard 0/1 got SIGTERM: ending at once"]


@pytest.mark.process
@pytest.mark.parametrize("signum", [SIGHUP, SIGINT])
def test_server_when_signalled_then_it_drains_and_ends_with_status_0(start, signum):
    server, _ = ready(start)

    server.signal(signum)

    assert server.end() == 0
    assert re.search(rf"{signum.name}: draining .*second signal", server.output)


@pytest.mark.process
def test_server_when_signalled_again_during_a_drain_then_it_ends_at_once(start):
    server, address = ready(start, "--grace", "600")
    with grpc.insecure_channel(address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING  # a call that does not end by itself

        server.signal(SIGTERM)
        assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
        server.line("draining")
        server.signal(SIGTERM)

        assert server.end() == 128 + SIGTERM


@pytest.mark.process
def test_server_when_its_workers_have_left_then_exit_when_done_ends_it_with_status_0(start):
    server, address = ready(start, "--exit-when-done")
    with grpc.insecure_channel(address) as channel:
        control = control_pb2_grpc.ControlServiceStub(channel)
        joined = control.Join(control_pb2.JoinRequest(shard_count=1, world_size=1))

        request = control_pb2.LeaveRequest()
        request.caller.run_id = joined.run_id
        request.caller.incarnation = joined.incarnation
        request.caller.session = joined.session
        control.Leave(request)

    assert server.end() == 0
    assert "done: all workers have left" in server.output


@pytest.mark.process
def test_server_when_the_address_is_taken_then_one_line_says_so_and_the_status_is_1(start):
    _, address = ready(start)

    second = start("psd.cli.server", "--shard", "0/1", "--listen", address)

    assert second.end() == 1
    assert second.lines[-1].startswith("psd-server: error: ")
    assert address in second.lines[-1]


@pytest.mark.process
def test_server_when_its_checkpoints_cannot_be_looked_at_then_one_line_says_so_and_the_status_is_1(start, tmp_path):
    place = tmp_path / "place"
    place.write_text("no directory")

    server = start("psd.cli.server", "--shard", "0/1", "--listen", "127.0.0.1:0", "--checkpoint-dir", str(place))

    assert server.end() == 1
    assert server.lines[-1] == f"psd-server: error: --checkpoint-dir: cannot list {place}: Not a directory"
    assert not any(line.startswith("Traceback") for line in server.lines)
