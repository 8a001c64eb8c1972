"""TLS and tokens as a worker, a reader and psdctl meet them: refusals that say why, and changes in the middle of a job."""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from certificates import Authority
from client_faults import Restartable, Thread, until

import psd_client
from psd.cli.psdctl import main as psdctl
from psd.rim.server import ShardServer

HOST = "127.0.0.1"
SIZE = 400_000  # two blocks
TOKENS = {role: f"{role}-token-number-1" for role in ("worker", "publisher", "reader", "admin")}


@pytest.fixture(scope="module")
def authorities() -> dict[str, Authority]:
    return {name: Authority(name) for name in ("ours", "theirs")}


class Place:
    """A directory with the files of shards and clients."""

    def __init__(self, path: Path, authorities: dict[str, Authority]) -> None:
        self.path = path
        self.authorities = authorities
        for name, authority in authorities.items():
            self.write(f"{name}.pem", authority.pem)
        self.list_tokens(**TOKENS)
        for role, token in TOKENS.items():
            self.write(f"{role}.token", token.encode() + b"\n")

    def write(self, name: str, data: bytes) -> str:
        path = self.path / name
        path.touch(0o600)
        path.write_bytes(data)
        return str(path)

    def list_tokens(self, **tokens: str) -> str:
        """Replace the tokens that the shards accept."""
        lines = "".join(f"{role.rstrip('_')} {token}\n" for role, token in tokens.items())
        return self.write("tokens", lines.encode())

    def certificate(self, name: str, *hosts: str, by: str = "ours", days: float = 1) -> dict[str, str]:
        return self.authorities[by].issue(*hosts, days=days).write(self.path, name)

    def at(self, name: str) -> str:
        return str(self.path / name)

    def client(self, role: str = "worker", ca: str = "ours") -> dict[str, str]:
        return {"tls_ca": self.at(f"{ca}.pem"), "token_file": self.at(f"{role}.token")}


@pytest.fixture
def place(tmp_path: Path, authorities: dict[str, Authority]) -> Place:
    return Place(tmp_path, authorities)


def serve(cluster: Callable[..., Any], place: Place, count: int = 1, **config: Any) -> Any:
    """Shards with TLS and tokens."""
    return cluster(count, **{**place.certificate("shard", HOST), "token_file": place.at("tokens"), **config})


def train(ps: Any, steps: int) -> Any:
    """So many steps; each takes 1 from each parameter."""
    for _ in range(steps):
        values = ps.push_pull({"w": np.ones(SIZE, np.float32)})["w"]
    return values


def declare(ps: Any) -> None:
    ps.declare({"w": np.zeros(SIZE, np.float32)}, psd_client.SGD(lr=1.0))


# -- who is let in ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["shm", "tcp", "grpc"])
def test_train_when_there_are_tls_and_tokens_then_every_lane_works(
    cluster: Callable[..., Any], place: Place, transport: str
) -> None:
    servers = serve(cluster, place, 2).servers

    with psd_client.connect(servers, 0, 1, transport=transport, **place.client()) as ps:
        declare(ps)
        values = train(ps, 3)
        assert ps.transports == [transport] * 2
        assert set(values.tolist()) == {-3.0}


def test_train_when_much_goes_both_ways_at_once_over_tls_then_every_number_arrives(
    cluster: Callable[..., Any], place: Place, impatient: Any
) -> None:
    """Each side sends and receives from threads of its own, in 7 blocks; and a wait that ends, ends the call and no more."""
    shard = serve(cluster, place).shards[0]
    values = np.arange(1_600_000, dtype=np.float32) % 1000
    job = {"optimizer": psd_client.SGD(lr=1.0), "reduce": "sum"}

    with psd_client.connect(shard.address, 0, 2, transport="tcp", **place.client()) as first:
        first.declare({"w": values}, **job)
        with impatient(), pytest.raises(psd_client.WaitTimeout):
            first.push_pull({"w": values})
        with psd_client.connect(shard.address, 1, 2, transport="tcp", **place.client()) as second:
            second.declare({"w": values}, **job)
            other = Thread(lambda: second.push_pull({"w": values})["w"])
            found = [first.push_pull({"w": values})["w"], other.result()]

    for result in found:
        assert result.tobytes() == (values - 2 * values).tobytes()


def test_pull_when_a_reader_has_a_token_then_it_reads_and_nothing_else(cluster: Callable[..., Any], place: Place) -> None:
    servers = serve(cluster, place, 2).servers
    with psd_client.connect(servers, 0, 1, **place.client()) as ps:
        declare(ps)
        train(ps, 1)

        with psd_client.connect(servers, role="reader", **place.client("reader")) as reader:
            assert set(reader.pull()["w"].tolist()) == {-1.0}


CASES = {
    "expired": ({"days": -1}, {}, "the shard's certificate has expired"),
    "foreign": ({"by": "theirs"}, {}, "the shard's certificate is not signed by an authority in tls_ca"),
    "another address": ({"hosts": ("10.9.8.7", "localhost")}, {}, "the shard's certificate is not for 127.0.0.1"),
    "plain client": ({}, {"tls_ca": ""}, "the shard speaks TLS: pass tls_ca"),
    "no certificate": ({"client_ca": "ours"}, {}, "the shard admits nobody with this client's certificate"),
    "foreign client": ({"client_ca": "theirs"}, {"by": "ours"}, "the shard admits nobody with this client's certificate"),
}


@pytest.mark.parametrize("case", CASES)
def test_connect_when_a_certificate_is_wrong_then_says_which_and_why(
    cluster: Callable[..., Any], place: Place, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """At once, and by the same words in psdctl, whose status is 1."""
    shard, client, words = CASES[case]
    pair = place.certificate("shard", *shard.get("hosts", (HOST,)), by=shard.get("by", "ours"), days=shard.get("days", 1))
    if "client_ca" in shard:
        pair["tls_client_ca"] = place.at(f"{shard['client_ca']}.pem")
    servers = cluster(1, **pair).servers
    settings = {"tls_ca": place.at("ours.pem"), **{k: v for k, v in client.items() if k != "by"}}
    if "by" in client:
        settings |= place.certificate("client", "worker", by=client["by"])

    with pytest.raises(psd_client.TlsFailed, match=words) as caught:
        psd_client.connect(servers, 0, 1, retry_timeout=30, **settings)
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    status = psdctl(["status", "--servers", servers, *flags])

    assert f"shard 0 at {servers}" in str(caught.value)
    assert status == 1
    assert words in capsys.readouterr().out


def test_connect_when_the_shard_does_without_tls_then_says_so(cluster: Callable[..., Any], place: Place) -> None:
    with pytest.raises(psd_client.TlsFailed, match="the shard does not speak TLS"):
        psd_client.connect(cluster(1).servers, 0, 1, tls_ca=place.at("ours.pem"))


def test_connect_when_both_sides_show_certificates_then_works_on_every_port(cluster: Callable[..., Any], place: Place) -> None:
    servers = serve(cluster, place, tls_client_ca=place.at("ours.pem")).servers
    own = place.certificate("client", "worker 0")

    with psd_client.connect(servers, 0, 1, transport="tcp", **place.client(), **own) as ps:
        declare(ps)
        assert set(train(ps, 2).tolist()) == {-2.0}


@pytest.mark.parametrize(
    ("role", "error", "words"),
    [
        ("reader", psd_client.PermissionDenied, "Join: is for admin, publisher, worker; this token is a reader's"),
        (None, psd_client.Unauthenticated, "Join: this shard requires a token: pass token_file"),
        ("nobody", psd_client.Unauthenticated, "Join: this shard does not know the token"),
    ],
)
def test_connect_when_the_token_is_wrong_then_says_what_is_wanted(
    cluster: Callable[..., Any], place: Place, role: str | None, error: type[Exception], words: str
) -> None:
    servers = serve(cluster, place).servers
    place.write("nobody.token", b"nobody-nobody-nobody")
    settings = place.client(role or "worker")
    if role is None:
        settings["token_file"] = ""

    with pytest.raises(error, match=words):
        psd_client.connect(servers, 0, 1, **settings)


def test_psdctl_when_the_token_is_a_workers_then_it_looks_but_takes_no_checkpoint(
    cluster: Callable[..., Any], place: Place, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = serve(cluster, place, checkpoint_dir=place.at("checkpoints")).servers
    monkeypatch.setenv("PSD_TLS_CA", place.at("ours.pem"))
    monkeypatch.setenv("PSD_TOKEN_FILE", place.at("worker.token"))

    assert psdctl(["status", "--servers", servers]) == 0
    assert psdctl(["checkpoint", "--servers", servers]) == 1
    assert "Checkpoint: is for admin; this token is a worker's" in capsys.readouterr().err
    assert psdctl(["checkpoint", "--servers", servers, "--token-file", place.at("admin.token")]) == 1
    assert "no job" in capsys.readouterr().err


@pytest.mark.parametrize("transport", ["tcp", "grpc"])
def test_a_publisher_pushes_and_pulls_but_neither_ends_the_job_nor_runs_batches(
    cluster: Callable[..., Any], place: Place, transport: str
) -> None:
    """On the bulk lane, too, where calls carry no token."""
    servers = serve(cluster, place, 2).servers

    with psd_client.connect(servers, 0, 1, transport=transport, **place.client("publisher")) as ps:
        declare(ps)
        assert set(train(ps, 2).tolist()) == {-2.0}
        with pytest.raises(psd_client.PermissionDenied, match="Stop: is for admin, worker; this token is a publisher's"):
            ps.stop()
        with pytest.raises(psd_client.PermissionDenied, match="Create: is for admin, worker"):
            ps.vector("v", size=4)
        assert set(train(ps, 1).tolist()) == {-3.0}


def test_a_publishers_token_is_enough_to_publish(cluster: Callable[..., Any], place: Place) -> None:
    """And a reader's to pull."""
    servers = serve(cluster, place, 2).servers
    with psd_client.publish(servers, **place.client("publisher")) as store:
        version = store.put({"w": np.ones(SIZE, np.float32)}, meta={"step": 1})
        with psd_client.connect(servers, role="reader", **place.client("reader")) as reader:
            found = reader.pull()
    assert (found.version, set(found["w"].tolist())) == (version, {1.0})


def test_a_batch_on_the_bulk_lane_needs_a_workers_token(cluster: Callable[..., Any], place: Place) -> None:
    """The vector is there: a worker has made it, whose token has become a publisher's since."""
    servers = serve(cluster, place).servers
    with psd_client.connect(servers, 0, 1, transport="tcp", **place.client()) as ps:
        vector = ps.vector("v", size=4)
        vector.put(np.ones(4))
        place.list_tokens(publisher=TOKENS["worker"], worker=TOKENS["publisher"], admin=TOKENS["admin"])

        with pytest.raises(psd_client.PermissionDenied, match="Run: is for workers; this token may push"):
            vector.put(np.ones(4))

        place.list_tokens(**TOKENS)
        assert vector.pull().tolist() == [1.0] * 4


def test_a_readers_token_follows_and_reads_but_pushes_and_steers_nothing(
    cluster: Callable[..., Any], place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    servers = serve(cluster, place).servers
    where = ["--servers", servers, "--tls-ca", place.at("ours.pem"), "--token-file", place.at("reader.token")]
    with psd_client.connect(servers, 0, 1, **place.client()) as ps:
        declare(ps)
        train(ps, 1)
        with psd_client.connect(servers, role="reader", **place.client("reader")) as reader:
            assert set(reader.pull()["w"].tolist()) == {-1.0}
        assert psdctl(["follow", "--to", place.at("versions"), "--once", *where]) == 0
        assert psdctl(["status", *where]) == 0
        capsys.readouterr()
        for words, call in (
            (["set-lr", "0.5"], "SetLearningRate"),
            (["drain"], "Drain"),
            (["kick", "0"], "Kick"),
            (["checkpoint"], "Checkpoint"),
        ):
            assert psdctl([*words, *where]) == 1
            assert f"{call}: is for admin; this token is a reader's" in capsys.readouterr().err
        with pytest.raises(psd_client.PermissionDenied, match="Join: is for admin, publisher, worker"):
            psd_client.connect(servers, 0, 1, **place.client("reader"))
        assert set(train(ps, 1).tolist()) == {-2.0}
    assert (place.path / "versions" / "latest" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("name", "data", "mode", "words"),
    [
        ("token_file", b"worker worker-token-number-1", 0o600, "expected one token and nothing else"),
        ("token_file", b"short", 0o600, "16 to 256 characters"),
        ("token_file", b"worker-token-number-1", 0o602, "all users of this machine can write"),
        ("tls_ca", b"not a certificate", 0o600, "holds no PEM certificates"),
        ("tls_ca", b"\xff\xfe", 0o600, "holds no PEM certificates"),
        ("tls_ca", bytes(1 << 21), 0o600, "has more than 1048576 bytes"),
    ],
)
def test_connect_when_a_file_is_wrong_then_names_it(place: Place, name: str, data: bytes, mode: int, words: str) -> None:
    path = place.write("wrong", data)
    os.chmod(path, mode)  # noqa: PTH101

    with pytest.raises(psd_client.ConfigError, match=f"{name}: .*{words}") as caught:
        psd_client.connect("127.0.0.1:1", 0, 1, **{name: path})

    assert path in str(caught.value)
    assert "worker-token" not in str(caught.value)


# -- changes amid a job ----------------------------------------------------------------------------------------------------


def cut(shard: ShardServer) -> None:
    """End the worker's bulk connection, as a network does."""
    shard._bulk._by_rank[0].hang_up()


@pytest.mark.parametrize("transport", ["tcp", "grpc"])
def test_train_when_token_and_certificate_are_changed_then_goes_on(
    cluster: Callable[..., Any], place: Place, transport: str
) -> None:
    """Both tokens are listed, the worker's file changes, the old one is listed no more; the certificate is swapped. Whoever
    connects from now on sees the new ones, also this worker; no step is lost, none counted twice."""
    shard = serve(cluster, place).shards[0]
    before = ssl.get_server_certificate((HOST, int(shard.address.rpartition(":")[2])))
    with psd_client.connect(shard.address, 0, 1, transport=transport, **place.client()) as ps:
        declare(ps)
        train(ps, 2)

        place.list_tokens(worker=TOKENS["worker"], worker_="worker-token-number-2", reader=TOKENS["reader"])
        train(ps, 1)
        place.write("worker.token", b"worker-token-number-2")
        train(ps, 1)
        place.list_tokens(worker="worker-token-number-2", reader=TOKENS["reader"])
        place.certificate("shard", HOST, "another-name")
        train(ps, 1)
        if transport == "tcp":
            cut(shard)
        ps._worker._shards.lanes[0]._channel._channel.close()  # which the lane takes for a broken one
        ps._worker._shards.lanes[0]._channel._channel = None
        values = train(ps, 1)

        after = ssl.get_server_certificate((HOST, int(shard.address.rpartition(":")[2])))
        assert before != after
        assert set(values.tolist()) == {-6.0}
        assert ps.stats()["rejoins"] == 0
        place.write("old.token", TOKENS["worker"].encode())
        with pytest.raises(psd_client.Unauthenticated):
            psd_client.connect(shard.address, 0, 1, **place.client("old"))


def test_train_when_the_token_changes_unnoticed_then_reads_it_again(cluster: Callable[..., Any], place: Place) -> None:
    """A file that was changed within one tick of its clock, to the same size: both shards' refusals make the worker look."""
    servers = serve(cluster, place, 2).servers
    with psd_client.connect(servers, 0, 1, transport="grpc", **place.client()) as ps:
        declare(ps)
        train(ps, 1)
        path = place.path / "worker.token"
        stat = path.stat()

        path.write_bytes(b"worker-token-number-2\n")
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        place.list_tokens(worker="worker-token-number-2")

        assert set(train(ps, 1).tolist()) == {-2.0}


@pytest.mark.parametrize("transport", ["tcp", "grpc"])
def test_train_when_the_certificate_is_wrong_for_a_while_then_goes_on_with_the_right_one(
    cluster: Callable[..., Any], place: Place, transport: str
) -> None:
    """Amid a job a wrong certificate is one more reason for which a shard cannot be reached: tried again."""
    shard = serve(cluster, place).shards[0]
    with psd_client.connect(shard.address, 0, 1, transport=transport, retry_timeout=60, **place.client()) as ps:
        declare(ps)
        train(ps, 1)
        place.certificate("shard", HOST, days=-1)
        lane = ps._worker._shards.lanes[0]
        if transport == "tcp":
            cut(shard)
        lane._channel._channel.close()
        lane._channel._channel = None

        step = Thread(lambda: train(ps, 1))
        until(lambda: bool(ps._worker._shards.health.silent()))
        place.certificate("shard", HOST)

        assert set(step.result().tolist()) == {-2.0}


def test_train_when_the_wrong_certificate_stays_then_the_last_error_says_why(cluster: Callable[..., Any], place: Place) -> None:
    shard = serve(cluster, place).shards[0]
    with psd_client.connect(shard.address, 0, 1, transport="grpc", retry_timeout=0.5, **place.client()) as ps:
        declare(ps)
        train(ps, 1)
        place.certificate("shard", HOST, by="theirs")
        ps._worker._shards.lanes[0]._channel._channel.close()
        ps._worker._shards.lanes[0]._channel._channel = None

        with pytest.raises(psd_client.ShardUnavailable, match="is not signed by an authority in tls_ca"):
            train(ps, 1)
        place.certificate("shard", HOST)


def test_train_when_the_authority_is_changed_then_the_worker_reads_the_new_one(
    cluster: Callable[..., Any], place: Place
) -> None:
    """First both, then the shard's certificate by the new one; the next connection is made with what is in the file then."""
    shard = serve(cluster, place).shards[0]
    ca = place.write("ca.pem", place.authorities["ours"].pem)
    with psd_client.connect(shard.address, 0, 1, transport="grpc", **{**place.client(), "tls_ca": ca}) as ps:
        declare(ps)
        train(ps, 1)

        place.certificate("shard", HOST, by="theirs")
        shard._tls._files.refresh()
        lane = ps._worker._shards.lanes[0]
        channel = lane._channel._channel
        place.write("ca.pem", place.authorities["ours"].pem + place.authorities["theirs"].pem)
        lane._channel._renew()

        assert lane._channel._channel is not channel
        assert set(train(ps, 1).tolist()) == {-2.0}


@pytest.mark.parametrize("transport", ["tcp", "grpc"])
def test_train_when_a_shard_is_restarted_then_its_new_certificate_and_tokens_hold(
    cluster: Callable[..., Any], tmp_path: Path, place: Place, transport: str
) -> None:
    """A shard that comes back with another certificate and without the old token: resumed, and each gradient counted once."""
    config = {**place.certificate("shard", HOST), "token_file": place.at("tokens")}
    job = Restartable(cluster, tmp_path, **config)
    with psd_client.connect(job.servers, 0, 1, transport=transport, **place.client()) as ps:
        declare(ps)
        train(ps, 1)

        place.certificate("shard", HOST)
        place.list_tokens(worker="worker-token-number-2")
        place.write("worker.token", b"worker-token-number-2")
        for index in range(2):
            job.restart(index)

        assert set(train(ps, 2).tolist()) == {-3.0}
        assert [job.version(0), job.version(1)] == [3, 3]
        assert [lane.split()[0] for lane in ps.transports] == [transport] * 2
