"""The benchmarks run, verify what they measure, and say what they leave out. Small forms, whose figures mean nothing."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loaded_programs import WITH_TORCH, completed

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
LATER_COMPILER = str(Path(__file__).parents[1] / "later_compiler")
"""Programs have it on their path, as by the fixture `later_compiler`, which those of a whole module cannot use."""


def run(script: str, *flags: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """A script of benchmarks/."""
    path = os.pathsep.join(filter(None, (LATER_COMPILER, os.environ.get("PYTHONPATH"))))
    environ = {**os.environ, "PYTHONPATH": path, **environ}
    like = {"loads": WITH_TORCH, "has_grpc_forks": False, "generations": 2}  # benchmarks/_report.py says why gRPC has none
    return completed([str(BENCHMARKS / script), *flags], timeout=280, env=environ, **like)


def figures_in(folder: Path, script: str, *flags: str) -> dict[str, Any]:
    """The figures of a script, of which `stdout` is what it has printed."""
    done = run(script, *flags, "--json", str(folder / "figures"))
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "figures").read_text()) | {"stdout": done.stdout}


@pytest.fixture
def figures_of(tmp_path):
    """figures_of(script, *flags): figures_in a folder of the test's own."""
    return functools.partial(figures_in, tmp_path)


@pytest.mark.process
def test_step_when_a_transport_is_unknown_then_it_is_left_out_and_the_others_are_measured(figures_of):
    """What connect refuses stands in the report with connect's own words."""
    slow = "sgd kernel,raw tcp in turns,grpc unary,gloo all-reduce,torch rpc,ray,tensorflow"
    size = ("--model", "mlp", "--workers", "2", "--rounds", "1", "--steps", "2")

    figures = figures_of("step.py", "--transports", "grpc,warp", *size, "--without", slow)

    assert "psd warp is left out: psd_client.connect refuses it: transport: expected one of" in figures["stdout"]
    measured = [(r["system"], r["workers"], len(r["steps_s"])) for r in figures["results"]]
    assert measured == [
        ("psd grpc", 2, 2),
        ("psd grpc", 1, 2),
        ("by hand", 2, 2),
        ("memcpy", 1, 2),
        ("raw tcp duplex", 2, 2),
        ("grpc stream", 2, 2),
    ]
    psd, copying = figures["results"][0], figures["results"][3]
    assert psd["server_cpu_s_per_gb"] > 0
    assert copying["server_cpu_s_per_gb"] is None


@pytest.mark.process
def test_fan_out_when_readers_are_at_relays_then_the_shard_sends_each_version_once_a_relay(figures_of):
    size = ("--readers", "8", "--relays", "2", "--steps", "2", "--rounds", "1", "--interval", "0.1")

    results = figures_of("fan_out.py", *size)["results"]

    assert [(r["readers_at"], r["readers"]) for r in results] == [("no readers", 0), ("shard", 8), ("2 relays", 8)]
    assert results[0]["sent_per_step"] == 0
    assert results[1]["sent_per_step"] > 2 * results[2]["sent_per_step"] > 0
    assert all(result["alone_cpu_s"] > 0 for result in results)


@pytest.mark.process
def test_publishing_when_a_few_numbers_have_changed_then_few_bytes_travel(figures_of):
    size = ("--megabytes", "8", "--transports", "tcp", "--rounds", "1", "--waits", "2")

    figures = figures_of("publishing.py", *size)

    (result,) = figures["results"]
    assert result["bytes"]["read"] >= 1
    assert 0.5 <= result["bytes"]["bfloat16"] < 0.51
    assert result["bytes"]["changed"] < 0.08
    assert len(figures["waits_s"]) == 2


@pytest.mark.process
def test_backpressure_when_the_shard_is_held_back_then_every_process_is_watched(figures_of):
    """A suspended shard goes on, and what was pushed meanwhile is counted once."""
    size = ("--transports", "grpc", "--workers", "2", "--megabytes", "2", "--seconds", "1")

    results = figures_of("backpressure.py", *size)["results"]

    assert [r["process"] for r in results] == ["shard", "worker 0", "worker 1"]
    assert all(r["most_bytes_held"] >= r["most_bytes_free"] >= r["before_bytes"] > 0 for r in results)


@pytest.mark.process
@pytest.mark.skipif(shutil.which("openssl") is None, reason="the certificate is made by the command openssl")
def test_tls_when_it_runs_then_the_step_is_measured_with_and_without_it(figures_of):
    size = ("--transports", "tcp", "--model", "1kb", "--rounds", "1", "--steps", "2")

    results = figures_of("tls.py", *size)["results"]

    assert [(r["system"], len(r["steps_s"])) for r in results] == [("psd tcp", 2), ("psd tcp tls", 2)]


@pytest.mark.process
def test_abuse_when_connections_are_held_then_their_number_is_bounded_and_the_job_is_right(figures_of):
    """Two attacks, one after the other, on a job that goes on; what each has cost is in the figures."""
    size = ("--transports", "grpc", "--megabytes", "1", "--seconds", "0.2", "--rounds", "1")

    results = figures_of("abuse.py", *size, "--attacks", "silence tcp,calls nothing")["results"]

    assert [r["attack"] for r in results] == ["silence tcp", "calls nothing"]
    assert all(r["tried"] > 10 and r["kept"] > 0 for r in results)
    assert 0 < results[0]["grown_descriptors"] < 200


@pytest.mark.process
def test_soak_when_workers_leave_and_die_then_every_push_is_accounted_for(figures_of):
    """A few seconds of it: the counts are compared, the lines are drawn."""
    figures = figures_of("soak.py", "--minutes", "0.06", "--every", "2", "--shards", "1")

    assert figures["wrong"] == []
    assert figures["events"]["killed"] >= 1
    assert [r["process"] for r in figures["results"]] == ["shard 0", "worker 0", "worker 1"]


@pytest.mark.process
def test_table_soak_when_a_shard_is_killed_then_every_sum_and_counter_is_right(figures_of):
    """It exits with 1 otherwise."""
    figures = figures_of("table_soak.py", "--minutes", "0.06", "--every", "2")

    assert figures["kills"] >= 1


@pytest.mark.process
def test_slow_links_when_no_link_is_limited_then_both_forms_learn_the_same(figures_of):
    """A table's bytes are a small part of those of the tensor."""
    size = ("--mbit", "0", "--workers", "1", "--shards", "1", "--transports", "tcp", "--steps", "40", "--rounds", "1")

    (result,) = figures_of("slow_links.py", *size)["results"]

    assert result["times_fewer_bytes"] > 50


@pytest.fixture(scope="module")
def far_apart(tmp_path_factory) -> dict[str, Any]:
    """The figures of one run with several parts, all with two learners."""
    pytest.importorskip("torch")
    size = ("--learners", "2", "--steps", "50", "--seeds", "1", "--batch-size", "1", "--ways", "DiLoCo,Streaming,in 8")
    size += ("--megabytes", "1", "--sites", "30", "--seconds", "5", "--step-ms", "100")
    return figures_in(tmp_path_factory.mktemp("far-apart"), "far_apart.py", "--parts", "quality,many,synchronizer", *size)


@pytest.fixture(scope="module")
def learners_die(tmp_path_factory) -> dict[str, Any]:
    """The figures of a run in which learners are killed."""
    pytest.importorskip("torch")
    size = ("--learners", "3", "--steps", "60", "--seeds", "1", "--batch-size", "1", "--ways", "one dying,by gloo")
    size += ("--death", "1.5", "--seconds", "4", "--every", "1.5", "--away", "1", "--step-ms", "50", "--only-failures")
    return figures_in(tmp_path_factory.mktemp("far-apart"), "far_apart.py", "--parts", "quality,goodput", *size)


@pytest.mark.process
def test_far_apart_when_it_runs_then_local_steps_send_a_fraction_of_the_bytes(far_apart):
    runs = {run["way"]: run for run in far_apart["quality"]}

    each_step = runs["data parallel"]["sent_bytes"]
    assert runs["DiLoCo"]["sent_bytes"] == pytest.approx(each_step / 50)
    assert runs["Streaming, 8 fragments"]["sent_bytes"] == pytest.approx(each_step / 50)
    assert each_step / 200 <= runs["DiLoCo, int8"]["sent_bytes"] < each_step / 180
    assert each_step / 400 <= runs["int4 in 8 fragments"]["sent_bytes"] < each_step / 300
    assert all(0 < run["loss"] < 4 for run in runs.values())


@pytest.mark.process
def test_far_apart_when_thirty_small_sites_train_then_every_step_counts_once(far_apart):
    """The benchmark itself counts: it fails if a step is lost, or counted twice."""
    many = far_apart["many"]

    assert many["rounds"] > 0
    assert 1 <= many["exchanges"] / many["rounds"] <= 4, "of thirty a tenth takes part"
    assert many["steps"] >= 30


@pytest.mark.process
def test_far_apart_when_the_synchronizer_is_measured_then_differences_travel_in_four_bits(far_apart):
    found = far_apart["synchronizer"]

    assert found["cpu_s"] > 0
    assert 0.125e6 < found["sent_bytes"] < 0.14e6


@pytest.mark.process
def test_far_apart_when_a_learner_is_slow_and_one_dies_then_they_learn_from_as_many_tokens(learners_die):
    """The last one is killed at least once, and comes back."""
    calm, disturbed = learners_die["quality"]

    assert disturbed["way"] == "decoupled, int4, one slow, one dying"
    assert disturbed["kills"] >= 1
    assert 0 < disturbed["loss"] < 4
    for found in (calm, disturbed):
        assert [len(shares) for shares in found["by_rank"].values()] == [3, 3, 3]
        assert sum(map(sum, found["by_rank"].values())) < 3


@pytest.mark.process
def test_far_apart_when_learners_by_gloo_die_then_those_who_are_left_meet_anew(learners_die):
    """And make steps; who comes back meets them, too."""
    runs = learners_die["goodput"]

    assert [run["way"] for run in runs] == ["data parallel by gloo", "DiLoCo by gloo"]
    assert all(run["kills"] == 2 and 0 < run["done"] <= 1.1 * run["possible"] for run in runs)


@pytest.mark.process
def test_far_apart_when_learners_die_then_the_steps_of_the_others_are_counted(figures_of):
    pytest.importorskip("torch")
    size = ("--learners", "2", "--seconds", "4", "--every", "1.5", "--away", "1", "--step-ms", "50", "--ways", "async")

    calm, failing = figures_of("far_apart.py", "--parts", "goodput", *size)["goodput"]

    assert calm["kills"] == 0
    assert failing["kills"] == 2
    assert failing["possible"] < calm["possible"]
    assert all(0 < run["done"] <= 1.1 * run["possible"] for run in (calm, failing))


@pytest.mark.process
def test_far_links_when_no_link_is_limited_then_all_come_to_the_loss_of_training_in_step(figures_of):
    """With fewer bytes; at a loss that is soon reached."""
    pytest.importorskip("torch")
    size = ("--mbit", "0", "--learners", "1", "--shards", "1", "--dim", "32", "--steps", "20", "--lr", "0.01")
    size += ("--ways", "Streaming")

    in_step, streaming = figures_of("far_links.py", *size)["results"]

    assert streaming["reached"]
    assert streaming["loss"] <= in_step["loss"]
    assert streaming["bytes_per_step"] < in_step["bytes_per_step"] / 20


@pytest.mark.process
def test_simulated_goodput_when_chips_fail_often_then_only_decoupled_learners_go_on(figures_of, tmp_path):
    """The same failures in every run; who waits for nobody loses what its own failures cost, and no more."""
    picture = tmp_path / "goodput.png"
    size = ("--chips", "300000,1200000", "--failures", "40", "--repair", "600", "--step", "4", "--ways", "elastic,learners")

    results = figures_of("simulated_goodput.py", *size, "--picture", str(picture))["results"]

    share = {(result["way"], result["chips"]): result["goodput"] for result in results}
    elastic, local, eight, sixteen = (
        share[way, 1_200_000]
        for way in ("elastic data parallel", "DiLoCo, 8 learners", "decoupled, 8 learners", "decoupled, 16 learners")
    )
    assert elastic < local < eight < sixteen < 1
    assert all(share[way, 300_000] > share[way, 1_200_000] for way, _ in share)
    own = 1 / (1 + 25.0 * 150_000 / (365.25 * 86400))  # 150,000 chips, of which each failure costs 25 s
    assert own - 0.1 < eight < own + 0.03
    assert all(result["idle"] == 0 for result in results if result["way"].startswith("decoupled"))
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.process
def test_overhead_when_metrics_are_scraped_then_both_jobs_are_timed_in_turns(figures_of):
    """One transport, one round; each has a ratio; there were scrapes, and the dashboard has worked."""
    size = ("--transports", "shm", "--model", "mlp", "--rounds", "1", "--seconds", "0.1", "--watchers", "metrics,dashboard")

    metrics, dashboard = figures_of("overhead.py", *size)["results"]

    assert [len(result["ratios"]) for result in (metrics, dashboard)] == [1, 1]
    assert metrics["scrape_s"] > 0
    assert dashboard["cores"] > 0


@pytest.mark.process
def test_cuts_when_checkpoints_are_taken_then_steps_are_compared_with_those_of_turns_without(figures_of):
    """Also the longest ones; a checkpoint is of the beginning of each turn, however short that is."""
    size = ("--modes", "async", "--workers", "2", "--megabytes", "1", "--rounds", "2", "--seconds", "0.05")

    (result,) = figures_of("cuts.py", *size)["results"]

    assert result["checkpoints"] >= 2
    assert result["mean_ratio"] > 0
    assert result["longest_s_max"] >= result["longest_s"] > 0
    assert result["longest_s_quiet_max"] >= result["longest_s_quiet"] > 0


@pytest.mark.process
def test_start_when_a_job_begins_then_each_call_is_timed_and_its_memory_measured(figures_of):
    """What was declared is what comes back, at both workers."""
    size = ("--transports", "shm", "--megabytes", "2", "--shards", "1", "--tensors", "3", "--rounds", "1")

    (result,) = figures_of("start.py", *size)["results"]

    assert all(result[call]["s"] > 0 for call in ("provides", "fetches", "push_pull"))
    assert result["provides"]["after"]["pss"] < result["provides"]["after"]["rss"]
    assert result["provides"]["peak"] > result["provides"]["before"]["private"]


@pytest.mark.process
def test_table_store_when_it_is_small_then_every_part_is_measured(figures_of, tmp_path):
    """Reads and updates beside the loops in C, growth, and the recovery of what a process has left."""
    size = ("--rows", "2000", "--ids", "200", "--steps", "2", "--rounds", "1", "--recover", "100000")

    figures = figures_of("table_store.py", *size, "--directory", str(tmp_path))

    assert len(figures["speed"]) == 9
    assert all(row["share"] > 0 for row in figures["speed"])
    assert (figures["growth"]["rows"], figures["recovery"]["rows"]) == (4000, 100_000)


@pytest.mark.process
def test_latency_when_calls_are_few_then_each_contender_is_measured_on_its_cores(figures_of):
    """Both sides' processor time, too; of several shards each has a part, and the same size is measured at one."""
    size = (
        "--transports",
        "shm",
        "--consistency",
        "sync",
        "--cores",
        "one",
        "--shards",
        "1,2",
        "--calls",
        "20",
        "--rounds",
        "2",
    )

    results = figures_of("latency.py", "--parts", "calls", *size)["results"]

    assert [(r["system"], r["workers"], r["shards"], r["kb"], r["calls"]) for r in results] == [
        ("psd shm sync", 1, 1, 1, 20),
        ("psd shm sync", 1, 1, 8, 20),
        ("psd shm sync", 1, 2, 8, 20),
        ("raw tcp", 1, 0, 1, 20),
    ]
    assert all(r["worker_cpu_s_per_call"] > 0 and r["server_cpu_s_per_call"] > 0 for r in results)
    assert all(0 < r["p1_s"] <= r["p50_s"] <= r["p99_s"] for r in results)


@pytest.mark.process
@pytest.mark.parametrize(("transport", "consistency"), [("tcp", "async"), ("shm", "sync")])
def test_latency_when_workers_in_c_push_then_every_push_counts_once(figures_of, transport, consistency):
    """It exits with 1 otherwise."""
    size = ("--transports", transport, "--consistency", consistency, "--connections", "3", "--pushes", "20", "--rounds", "2")

    load = figures_of("latency.py", "--parts", "load", *size)["load"]

    assert [(r["system"], r["connections"]) for r in load] == [(f"psd {transport} {consistency}", 3), ("raw tcp", 3)]
    assert all(r["pushes"] >= 60 and r["pushes_per_s"] > 0 and r["server_cpu_s_per_push"] > 0 for r in load)


@pytest.mark.process
def test_latency_when_the_shard_is_busy_then_steps_are_measured_meanwhile(figures_of):
    size = ("--transports", "shm", "--calls", "50", "--rounds", "1", "--seconds", "0.1")

    busy = figures_of("latency.py", "--parts", "busy", *size)["busy"]

    assert [r["while"] for r in busy] == ["idle", "checkpoints", "joins"]
    assert all(r["p50_s"] > 0 for r in busy)
    assert busy[1]["events"] >= 1
    assert busy[2]["events"] >= 50


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--calls", "0"), "--calls: expected 10 (--rounds) to 9900, got 0"),
        (("--workers", "1,9"), "--workers: expected 1 to 8, got 1,9"),
        (("--shards", "5"), "--shards: expected 1 to 4, got 5"),
        (("--cores", "three"), "there is no 'three'"),
    ],
)
def test_latency_when_a_number_cannot_be_measured_then_it_says_which(flags, words):
    done = run("latency.py", *flags)

    assert done.returncode == 2
    assert words in done.stderr


@pytest.mark.process
def test_sparse_when_it_is_small_then_every_part_is_measured_and_verified(figures_of):
    """A worker of psd beside references, many tables in one step, and the bytes of four shards."""
    size = ("--transports", "shm", "--workers", "1", "--rows", "2000", "--ids", "300", "--rounds", "1", "--steps", "2")

    figures = figures_of("sparse.py", *size, "--without", "raw tcp,bare grpc,torch rpc,ray,tensorflow")

    assert figures["left_out"] == {}
    assert [r["system"] for r in figures["results"]] == ["psd shm", "gather/scatter"]
    assert [r["system"] for r in figures["tables"]] == ["26 tables", "1 table"]
    assert len(figures["skew"]) == 4
    assert min(figures["skew"]) > 0


def test_verification_of_rows_when_one_is_wrong_then_it_is_named(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS / "peers"))
    import rows

    check = rows.Check(rows.Shape(1, 50, 2, 20, 1.05), rank=0, workers=1)
    assert check.difference(np.zeros((len(check.ids), 2)), 0) == ""
    assert f"id {check.ids[0]} has 0.0, not -" in check.difference(np.zeros((len(check.ids), 2)), 8)


def test_scale_when_there_are_no_tools_for_networks_then_it_says_which():
    """Status 2 and one line, instead of a traceback."""
    done = run("scale.py", PATH="")

    assert done.returncode == 2
    assert "scale.py cannot run here: there is no 'ip' command" in done.stderr
    assert "Traceback" not in done.stderr


def test_verification_when_one_number_is_wrong_then_it_is_named(monkeypatch):
    """A benchmark of wrong results would be worthless: the check itself can fail."""
    monkeypatch.syspath_prepend(str(BENCHMARKS / "peers"))
    import work

    # Two workers, three steps; element 1 has the gradients -124 and -123.
    values = work.expected([3, 3], 4)
    assert values[1] == 3 * 247 / 1024
    assert work.difference(values, [3, 3]) == ""

    values[1] += 1

    assert work.difference(values, [3, 3]).startswith("1 of 4 parameters are wrong; number 1 is 1.72")


@pytest.mark.process
def test_vectors_when_the_job_is_small_then_results_are_compared_and_every_operation_has_a_ratio():
    """NumPy has the same sums; the figures of so few elements mean nothing."""
    done = run("vectors.py", "--elements", "20000", "--history", "2", "--rounds", "1")

    assert done.returncode == 0, done.stderr
    assert "4. two loops: bandwidth, psd / NumPy" in done.stdout


@pytest.mark.process
def test_codecs_when_the_array_is_small_then_every_work_has_a_ratio(figures_of):
    """What rounds nothing has no stochastic form; numbers that were decoded are compared with the values."""
    figures = figures_of("codecs.py", "--elements", "100000", "--rounds", "1")

    works = {row["codec"]: set(row["works"]) for row in figures["results"]}
    assert len(works) == 7
    assert works["int8"] - works["sign"] == {"stochastic"}
    assert all(work["ratio"] > 0 for row in figures["results"] for work in row["works"].values())
    assert [criterion["number"] for criterion in figures["criteria"]] == [4, 4, 4]


@pytest.mark.process
def test_compression_when_it_is_measured_then_jobs_are_trained_with_and_without_and_each_step_is_verified(figures_of):
    """A residual is part of the sums: they are right but for it."""
    small = ("--codecs", "int4", "--seeds", "1", "--epochs", "1", "--model", "1kb", "--rounds", "1", "--steps", "1")

    figures = figures_of("compression.py", *small)

    kinds = {"feedback", "none, at random", "none, nearest", "pull", "compress and pull"}
    assert {(row["codec"], row["kind"]) for row in figures["accuracy"]} == {("", ""), *(("int4", kind) for kind in kinds)}
    assert all(0 < share <= 100 for row in figures["accuracy"] for share in row["accuracy"])
    assert [row["system"] for row in figures["steps"]] == [
        "psd tcp",
        "psd tcp int8",
        "psd tcp int8 pull bf16",
        "psd tcp int4 pull bf16",
        "psd tcp int8 pull int8",
        "psd tcp int4 pull int4",
    ]
