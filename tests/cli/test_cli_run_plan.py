"""psd-run: options, and what they make of shards' commands and workers' environments."""

import os
import sys
from pathlib import Path

import pytest

from psd.cli.hosts.launcher import Launcher
from psd.cli.job.actions import Name
from psd.cli.job.places import NodePlaces, spread
from psd.cli.run import main, parse
from psd.cli.server import parse as parse_shard
from psd.contract.environment import VARIABLES

SERVERS = ["127.0.0.1:7000", "127.0.0.1:7001"]


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("")
    return str(path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "expected a script, -m and a module, or a command"),
        (["nowhere.py"], "there is no script 'nowhere.py'"),
        (["no-such-command"], "'no-such-command' is neither a script (.py) nor a command"),
        (
            ["."],
            "'.' is neither a script (.py) nor a command that can be executed; name what runs it, such as: psd-run -- python .",
        ),
        (["-m"], "-m: expected the name of a Python module"),
        (["--shards", "0", "true"], "--shards: expected 1 to 256, got 0"),
        (["--workers", "two", "true"], "--workers: expected a whole number, got 'two'"),
        (["--consistency", "ssp", "true"], '--consistency: got \'ssp\'; expected "sync", "async" or "ssp:S"'),
        (["--quorum", "2", "true"], "--quorum: expected 1 to 1, got 2"),
        (["--workers", "2", "--quorum", "1", "--consistency", "async", "true"], "--quorum: is for sync only"),
        (["--aggregation", "exact", "--consistency", "async", "true"], "--aggregation: exact is for sync only"),
        (["--aggregation", "quick", "true"], "--aggregation: invalid choice: 'quick'"),
        (["--max-shard-restarts", "-1", "true"], "--max-shard-restarts: expected 0 to 1000000, got -1"),
        (["--checkpoint-secs", "60", "true"], "--checkpoint-dir: not given"),
        (["--parameters-only", "true"], "--from-checkpoint: not given"),
        (["--from-checkpoint", "m.safetensors", "true"], "--from-checkpoint: m.safetensors holds parameters alone"),
        (["--checkpoint-keep", "0", "true"], "--checkpoint-keep: expected 1 to 1000000, got 0"),
        (["--grace", "-1", "true"], "--grace: expected 0 to 3600 seconds, got -1"),
        (["--env", "=1", "true"], "--env: expected NAME=VALUE"),
        (["--env", "NOT_SET_HERE", "true"], "--env: NOT_SET_HERE has no value: it is not set here"),
        (["--env", "PSD_RANK=1", "true"], "--env: PSD_RANK is set by psd-run itself"),
        (["--nnodes", "2", "true"], "--rendezvous: not given; --nnodes needs the HOST:PORT at which node 0 waits"),
        (["--rendezvous", "h:1", "true"], "--nnodes: not given"),
        (["--nnodes", "2", "--rendezvous", "h", "true"], "--rendezvous: expected HOST:PORT"),
        (["--nnodes", "2", "--rendezvous", "h:1", "--node-rank", "2", "true"], "--node-rank: expected 0 to 1, got 2"),
        (
            ["--nnodes", "2", "--rendezvous", "0.0.0.0:1", "true"],
            "--rendezvous: expected an address of node 0 that all others can dial, got 0.0.0.0:1",
        ),
        (["--hosts", "a:2,b", "true"], "--hosts: expected HOST:WORKERS,HOST:WORKERS, such as a:4,b:4, got 'b'"),
        (["--hosts", "a:2,-oProxyCommand=x:1", "true"], "--hosts: expected HOST:WORKERS"),
        (["--hosts", "a:2,b:2", "--workers", "3", "true"], "--workers: --hosts has 4 workers, got 3"),
        (["--hosts", "a:2", "--nnodes", "2", "true"], "--nnodes: is for psd-run on every host"),
        (["--dashboard-port", "1", "true"], "--dashboard-port: is for --dashboard, which was not given"),
        (["--dashboard", "--dashboard-port", "65536", "true"], "--dashboard-port: expected 0 to 65535, got 65536"),
        (["--dashboard", "--hosts", "a:1", "true"], "--dashboard: is for psd-run on the shards' machine"),
        (["--insecure", "true"], "--insecure: is for shards that other machines reach: --nnodes"),
        (["--on", "slurm", "true"], "--on slurm: this is no task of srun; write srun psd-run --on slurm"),
        (["--on", "ray", "--log-dir", "d", "true"], "--log-dir: not with --on ray, where Ray keeps a log of each actor"),
        (["--on", "ray", "--max-shard-restarts", "3", "true"], "--max-shard-restarts: not with --on ray, where Ray starts"),
        (["--on", "ray", "--worker-resources", "GPU", "true"], "--worker-resources: expected NAME=COUNT"),
        (
            ["--on", "ray", "--worker-resources", "CPU=0", "true"],
            "--worker-resources: expected at least one above 0, got 'CPU=0'",
        ),
        (["--on", "ray", "absent.py"], "cannot read the script absent.py"),
        (["--unknown", "true"], "unrecognized arguments: --unknown"),
    ],
)
def test_main_when_an_option_is_wrong_then_one_line_says_what_was_expected(options, message, refusal):
    error = refusal(main, options)

    assert error.startswith("psd-run: error: ")
    assert message in error


def test_main_when_asked_for_help_then_it_explains_the_environment_and_the_policy(help_of):
    help_ = help_of(main)

    assert all(name in help_ for name in VARIABLES)
    assert "PSD_CRASH_POINT" not in help_, "which is for tests of psd itself"
    assert "when something dies" in help_
    assert "exit status:" in help_


def test_parse_when_a_script_is_given_then_all_after_it_is_its_own(script):
    plan = parse(["--workers", "2", script, "--workers", "7", "--help"], {})

    assert plan.places.workers == (2,)
    assert plan.worker_command == [sys.executable, "-u", script, "--workers", "7", "--help"]


@pytest.mark.parametrize(
    ("words", "is_odd"), [(["--workers", "2"], True), (["--workers", "1"], True), (["--epochs", "2"], False)]
)
def test_parse_when_one_worker_starts_and_its_program_gets_workers_then_remarks_on_it(script, words, is_odd):
    """psd-run train.py --workers 2 started one worker without a word."""
    assert parse([script, *words], {}).remark.startswith("one worker: --workers stands behind the program") == is_odd
    assert not parse(["--workers", "2", script, *words], {}).remark


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["-m", "package.train", "--shards", "9"], [sys.executable, "-u", "-m", "package.train", "--shards", "9"]),
        (["--", "echo", "--", "x"], ["echo", "--", "x"]),
        (["--", sys.executable, "app.zip"], [sys.executable, "app.zip"]),
        ([sys.executable], [sys.executable]),
        (["echo", "-m", "x"], ["echo", "-m", "x"]),
    ],
)
def test_parse_when_a_module_or_a_command_is_given_then_it_is_run_as_it_is(words, command):
    plan = parse(["--shards", "2", *words], {})

    assert (plan.places.shards, plan.worker_command) == (2, command)


def test_parse_when_twice_then_the_runs_have_different_ids(script):
    first, second = parse([script], {}), parse([script], {})

    assert first.run_id.startswith("train-")
    assert first.run_id != second.run_id


def test_shard_command_when_metrics_are_asked_for_then_each_shard_has_a_port_of_its_own(script):
    plan = parse(["--shards", "2", "--metrics-port", "9100", script], {})

    commands = [plan.shard_command(index, "127.0.0.1:0", Path("/state")) for index in range(2)]

    assert [[word for word in command if "metrics" in word] for command in commands] == [
        ["--metrics-port=9100"],
        ["--metrics-port=9101"],
    ]


def test_worker_environ_when_options_are_given_then_only_those_are_set(script):
    options = "--shards 2 --workers 3 --consistency sync --aggregation exact --reduce sum --streams 4"
    plan = parse([*options.split(), script], {"HOME": "/home"})

    environ = plan.worker_environ(1, SERVERS)

    assert {name: value for name, value in environ.items() if name.startswith("PSD_")} == {
        "PSD_SERVERS": "127.0.0.1:7000,127.0.0.1:7001",
        "PSD_RANK": "1",
        "PSD_WORLD_SIZE": "3",
        "PSD_LOCAL_RANK": "1",
        "PSD_RUN_ID": plan.run_id,
        "PSD_CONSISTENCY": "sync",
        "PSD_AGGREGATION": "exact",
        "PSD_REDUCE": "sum",
        "PSD_STREAMS": "4",
    }
    assert not {"RANK", "LOCAL_RANK", "WORLD_SIZE"} & environ.keys()
    assert environ["HOME"] == "/home"
    assert environ["PYTHONUNBUFFERED"] == "1"


def test_worker_environ_when_the_user_has_set_something_then_only_who_is_who_is_replaced(script):
    mine = {
        "OMP_NUM_THREADS": "7",
        "MALLOC_TRIM_THRESHOLD_": "1",
        "PSD_CONSISTENCY": "async",
        "PSD_RUN_ID": "outer",
        "PSD_RANK": "9",
    }
    plan = parse(["--workers", "2", script], mine)

    environ = plan.worker_environ(0, SERVERS)

    assert (environ["OMP_NUM_THREADS"], environ["MALLOC_TRIM_THRESHOLD_"], environ["PSD_CONSISTENCY"]) == ("7", "1", "async")
    assert (environ["PSD_RUN_ID"], environ["PSD_RANK"]) == (plan.run_id, "0")


def test_environ_when_variables_are_asked_for_then_shards_and_workers_have_them(script):
    plan = parse(["--env", "A=x=y", "--env", "HOME", "--env", "OMP_NUM_THREADS=5", script], {"HOME": "/home"})

    for environ in (plan.shard_environ, plan.worker_environ(0, SERVERS)):
        assert (environ["A"], environ["HOME"], environ["OMP_NUM_THREADS"]) == ("x=y", "/home", "5")


def test_environ_when_there_are_credentials_for_shards_elsewhere_then_they_are_not_handed_on(script):
    given = {"PSD_TLS_CA": "ca", "PSD_TLS_CERT": "c", "PSD_TLS_KEY": "k", "PSD_TOKEN_FILE": "t", "HOME": "/home"}
    plan = parse([script], given)

    for environ in (plan.shard_environ, plan.worker_environ(0, SERVERS)):
        assert environ.keys() & given.keys() == {"HOME"}


def test_worker_environ_when_threads_are_not_set_then_the_cores_are_shared_out(script):
    plan = parse(["--workers", "2", script], {})

    assert plan.worker_environ(0, SERVERS)["OMP_NUM_THREADS"] == str(max(1, len(os.sched_getaffinity(0)) // 2))


def test_shard_command_when_options_are_for_shards_then_psd_server_takes_them(script):
    checkpoints = (
        "--checkpoint-dir s3://bucket/run --checkpoint-secs 60 --checkpoint-steps 1000 --checkpoint-keep 2 --log-level debug"
    )
    rules = "--rule mine:A --rule mine:B --from-checkpoint model.safetensors --parameters-only"
    plan = parse([*f"--shards 2 --lease 3 --grace 4 {checkpoints} {rules}".split(), script], {})

    command = plan.shard_command(1, "127.0.0.1:7001", Path("/state/shard-1"))
    config, log_settings = parse_shard(command[command.index("psd.cli.server") + 1 :])

    assert (config.shard_index, config.shard_count, config.listen) == (1, 2, "127.0.0.1:7001")
    assert (config.run_id, config.state_dir, config.exit_when_done) == (plan.run_id, "/state/shard-1", True)
    assert (config.lease_s, config.grace_s) == (3, 4)
    assert (config.checkpoint_dir, config.checkpoint_secs) == ("s3://bucket/run", 60)
    assert (config.checkpoint_steps, config.checkpoint_keep) == (1000, 2)
    assert log_settings.level == "debug"
    assert config.rules == ("mine:A", "mine:B")
    assert (config.from_checkpoint, config.parameters_only) == ("model.safetensors", True)
    assert config.rule_dir == str(Path(script).absolute().parent)


def test_places_when_there_are_several_nodes_then_ranks_are_in_a_row_and_shards_go_round():
    places = NodePlaces(3, spread(5, 2))

    assert [[str(name) for name in places.names(node)] for node in range(2)] == [
        ["shard 0", "shard 2", "worker 0", "worker 1", "worker 2"],
        ["shard 1", "worker 3", "worker 4"],
    ]
    assert [places.node_of(Name("worker", rank)) for rank in range(5)] == [0, 0, 0, 1, 1]
    assert spread(1, 3) == (1, 0, 0)


def test_plan_when_it_is_of_a_node_then_its_workers_have_local_ranks_and_its_state_a_place_of_its_own(tmp_path):
    options = ["--nnodes", "2", "--rendezvous", "127.0.0.1:9", "--workers", "4", "--shards", "2", "--state-dir"]
    plan = parse([*options, str(tmp_path), "true"], {"PSD_TOKEN_FILE": "t"}, "run-7", 1)

    environ = plan.worker_environ(3, ["127.0.0.1:7000"])
    assert (environ["PSD_RANK"], environ["PSD_LOCAL_RANK"], environ["PSD_WORLD_SIZE"]) == ("3", "1", "4")
    assert (environ["PSD_RUN_ID"], environ["PSD_NODE"]) == ("run-7", "run-7/1")
    assert "PSD_TOKEN_FILE" not in environ
    assert plan.state_dirs == [tmp_path / "node-0", tmp_path / "node-1"]
    assert plan.is_here(Name("worker", 2))
    assert not plan.is_here(Name("shard", 0))


def test_launcher_when_shards_tell_of_checkpoints_in_turns_then_each_is_shown_once():
    """The second shard's output may be read when the first one has told of the next checkpoint."""
    launcher = Launcher(parse(["true"], {}))
    lines = [f"psd-server: INFO stored checkpoint timeline-00000-step-{step:012d}-a".encode() for step in (3, 4, 3, 4)]

    assert [launcher._is_repeated(line) for line in lines] == [False, False, True, True]
