"""The life of a job that psd-run --on kubernetes has made, with the real kubectl, in an API server that is not ours."""

from __future__ import annotations

import json
import re
import shutil

import pytest

pytest.importorskip("kmock", reason="it needs Python 3.11")

from api_server import Cluster
from kmock import KubernetesError

pytestmark = pytest.mark.filterwarnings("ignore:read_binary is deprecated:DeprecationWarning")  # kmock's list of resources

FOREIGN = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "foreign"}}

OF_A_JOB = {
    "configmap/psd",
    "configmap/psd-script",
    "networkpolicy.networking.k8s.io/psd",
    "networkpolicy.networking.k8s.io/psd-worker",
    "poddisruptionbudget.policy/psd",
    "secret/psd-tls",
    "secret/psd-tokens",
    "service/psd",
    "serviceaccount/psd",
    "statefulset.apps/psd",
    "job.batch/psd-worker",
}


@pytest.fixture
def cluster(tmp_path):
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    running = Cluster(tmp_path)
    yield running
    running.close()


@pytest.fixture
def psd_run(run, cluster, tmp_path, monkeypatch):
    """A function: psd-run of a job of two workers with options; its exit status and output."""
    (tmp_path / "train.py").write_text("print('hello')\n")
    monkeypatch.chdir(tmp_path)

    def begin(*options, shards=2):
        sizes = ["--shards", shards, "--workers", 2]
        started = run("--on", "kubernetes", "--image", "psd:1", *sizes, *options, "train.py", environ=cluster.environ)
        return started.end(), started.output

    return begin


def test_job_when_it_is_made_then_all_of_it_is_there_and_what_is_said_removes_it_and_nothing_else(psd_run, cluster):
    cluster.kubectl("apply", "--filename", "-", stdin=json.dumps(FOREIGN))

    status, said = psd_run()

    assert status == 0, said
    assert cluster.names() == OF_A_JOB | {"configmap/foreign"}
    assert cluster.get("statefulset/psd")["spec"]["replicas"] == 2
    assert cluster.get("job/psd-worker")["spec"]["completions"] == 2
    assert "made secret psd-tls and secret psd-tokens" in said

    remove = re.search(r"to remove all: +kubectl (.*)", said)[1].split()
    cluster.kubectl(*remove)
    assert cluster.names() == {"configmap/foreign"}


def test_job_when_it_is_running_then_another_one_of_its_name_is_refused_and_nothing_changes(psd_run, cluster):
    psd_run()
    before = cluster.get("job/psd-worker"), cluster.get("statefulset/psd")

    status, said = psd_run("--consistency", "async")
    assert status == 1
    assert "--name: job psd is running" in said
    status, said = psd_run(shards=3)
    assert status == 1
    assert "--shards: job psd has 2 shards, not 3; --rescale changes that" in said

    assert (cluster.get("job/psd-worker"), cluster.get("statefulset/psd")) == before
    remove = re.search(r"end it: kubectl (.*)", psd_run()[1])[1].split()
    cluster.kubectl(*remove)
    assert cluster.get("job/psd-worker") is None


@pytest.mark.parametrize(("condition", "shards"), [("Failed", 2), ("Complete", 2), ("Complete", 3)])
def test_job_when_it_has_ended_then_the_next_one_takes_its_place_and_its_credentials(psd_run, cluster, condition, shards):
    psd_run()
    cluster.end_job(condition)
    token = cluster.get("secret/psd-tokens")

    status, said = psd_run("--consistency", "async", shards=shards)

    assert status == 0, said
    assert "removing job psd-worker, which has ended" in said
    assert "removing the shards, to start them anew" in said
    assert cluster.names() == OF_A_JOB
    assert cluster.get("secret/psd-tokens") == token
    assert cluster.get("statefulset/psd")["spec"]["replicas"] == shards
    job = cluster.get("job/psd-worker")
    assert "status" not in job
    variables = job["spec"]["template"]["spec"]["containers"][0]["env"]
    assert {"name": "PSD_CONSISTENCY", "value": "async"} in variables


def test_job_when_it_has_failed_then_one_with_another_number_of_shards_is_refused(psd_run, cluster):
    """The volumes hold what the old number of shards has learnt."""
    psd_run()
    cluster.end_job("Failed")

    status, said = psd_run(shards=3)

    assert status == 1
    assert "--rescale changes that" in said
    assert cluster.get("statefulset/psd")["spec"]["replicas"] == 2


def test_rescaling_when_the_shards_take_no_checkpoint_then_nothing_is_removed(psd_run, cluster):
    """There is no pod here that could."""
    psd_run("--checkpoint-dir", "s3://bucket/run")

    status, said = psd_run("--checkpoint-dir", "s3://bucket/run", "--rescale", shards=3)

    assert status == 1
    assert re.search(r"kubectl exec psd-0 .*psdctl checkpoint: ", said), said
    assert cluster.names() == OF_A_JOB
    assert cluster.get("statefulset/psd")["spec"]["replicas"] == 2


def test_job_when_the_server_forbids_a_part_of_it_then_says_which_and_why(psd_run, cluster):
    why = "jobs.batch is forbidden: quota exceeded"
    cluster.server["post /apis/batch/v1/namespaces/jobs/jobs"] << KubernetesError(403, "Forbidden", why)

    status, said = psd_run()

    assert status == 1
    assert re.search(r"psd-run: error: kubectl apply .*quota exceeded", said, re.DOTALL), said


def test_job_when_no_server_answers_then_says_so(psd_run, cluster):
    cluster.close()

    status, said = psd_run()

    assert status == 1
    assert re.search(r"psd-run: error: kubectl get statefulset psd .*refused", said), said
