"""The programs of docs/following.md, run by psdctl follow beside a job; servers of language models are stood in for by one that
checks the calls."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from markdown_blocks import blocks
from source_tree import ROOT
from waiting import wait_until

import psd_client
from psd.cli.psdctl import main

A, B = "base_model.model.q_proj.lora_A.default.weight", "base_model.model.q_proj.lora_B.default.weight"


class Serving(HTTPServer):
    """Stands in for vLLM and SGLang: takes their calls as they do, and refuses what they refuse.

    Attributes:
        calls: paths and bodies, in their order. loaded: adapters by name, with what their files say.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.loaded: dict[str, float] = {}
        self.weights = 0.0

    def answer(self, path: str, body: dict[str, Any]) -> int:
        self.calls.append((path, body))
        if path == "/v1/load_lora_adapter":
            assert body.keys() <= {"lora_name", "lora_path", "load_inplace"}
            if body["lora_name"] in self.loaded and not body.get("load_inplace"):
                return 400
            place = Path(body["lora_path"])
            assert json.loads((place / "adapter_config.json").read_text())["peft_type"] == "LORA"
            tensors = safetensors.numpy.load_file(place / "adapter_model.safetensors")
            assert tensors.keys() == {A.replace(".default", ""), B.replace(".default", "")}
            self.loaded[body["lora_name"]] = float(tensors[A.replace(".default", "")][0, 0])
        elif path == "/v1/unload_lora_adapter":
            if self.loaded.pop(body["lora_name"], None) is None:
                return 404
        elif path == "/update_weights_from_disk":
            assert {"model_path"} <= body.keys() <= {"model_path", "load_format", "weight_version", "flush_cache"}
            place = Path(body["model_path"])
            assert json.loads((place / "config.json").read_text()) == {"model_type": "tiny"}
            self.weights = float(safetensors.numpy.load_file(place / "model.safetensors")[A][0, 0])
        else:
            return 404
        return 200


class Handler(BaseHTTPRequestHandler):
    """One call."""

    server: Serving

    def do_POST(self) -> None:
        assert self.headers["Content-Type"] == "application/json"
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        try:
            status = self.server.answer(self.path, body)
        except Exception as error:  # noqa: BLE001 - an assertion that fails is seen by the test as a call that failed
            status, self.server.calls[-1][1]["error"] = 500, repr(error)
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps({"success": status == 200, "message": "no"}).encode())

    def log_message(self, *_: Any) -> None:
        """Be quiet."""


@pytest.fixture
def serving() -> Iterator[Serving]:
    with Serving() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, serving: Serving) -> Callable[[str], list[str]]:
    """recipe(title) -> the command that runs a program of the page, in the directory where it lies."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("psd.cli.follow.follower.LOOK_S", 0.3)
    monkeypatch.setattr("psd.cli.follow.follower.RECONNECT_S", 0.5)
    monkeypatch.delenv("PSD_SERVERS", raising=False)
    for name in ("VLLM_URL", "SGLANG_URL"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{serving.server_port}")
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2}')
    (tmp_path / "config.json").write_text('{"model_type": "tiny"}')

    def written(title: str) -> list[str]:
        (text,) = (block.text for block in blocks(ROOT / "docs" / "following.md") if block.title == title)
        (tmp_path / title).write_text(text)
        return ["--", sys.executable, title]

    return written


@pytest.fixture
def job(cluster: Callable[..., Any]) -> Iterator[tuple[str, psd_client.ParameterServer]]:
    """A model with an adapter, of which every element of version n is -n."""
    servers = cluster(1).servers
    initial = {A: np.zeros((2, 4), np.float32), B: np.zeros((4, 2), np.float32), "base_model.model.norm": np.zeros(3)}
    with psd_client.connect(servers, 0, 1) as ps:
        ps.declare(initial, psd_client.SGD(lr=1.0))
        yield servers, ps


def step(ps: psd_client.ParameterServer) -> None:
    ones = {A: np.ones((2, 4), np.float32), B: np.ones((4, 2), np.float32), "base_model.model.norm": np.ones(3)}
    ps.push_pull(ones)


def test_a_program_evaluates_each_version(
    job: tuple[str, psd_client.ParameterServer], recipe: Callable[[str], list[str]], tmp_path: Path
) -> None:
    servers, ps = job
    words = ["follow", "--to", "versions", "--servers", servers, "--once", *recipe("evaluate.py")]

    assert main(words) == 0
    step(ps)
    assert main(words) == 0

    assert (tmp_path / "means.txt").read_text() == "0 0.0\n1 -1.0\n"


def test_vllm_is_told_of_each_version_by_a_name_of_its_own(
    job: tuple[str, psd_client.ParameterServer], recipe: Callable[[str], list[str]], serving: Serving, tmp_path: Path
) -> None:
    """It serves the newest alone, with that version's numbers."""
    servers, ps = job
    words = ["--to", "adapters", "--servers", servers, "--format", "peft", "--adapter-config", "adapter_config.json"]
    words += recipe("load_vllm.py")
    following = threading.Thread(target=main, args=(["follow", *words],))
    following.start()
    for version in range(3):
        wait_until(lambda version=version: serving.loaded == {f"policy-{version}": -float(version)}, f"{version} is served")
        step(ps)
    wait_until(lambda: serving.loaded == {"policy-3": -3.0}, "3 is served")
    ps.close()
    following.join(100)

    assert [path for path, _ in serving.calls][:3] == [
        "/v1/load_lora_adapter",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
    ]
    assert serving.calls[0][1] == {"lora_name": "policy-0", "lora_path": str(tmp_path / "adapters" / "version-00000000")}
    assert [body for _, body in serving.calls if "error" in body] == []


def test_sglang_takes_whole_models(
    job: tuple[str, psd_client.ParameterServer], recipe: Callable[[str], list[str]], serving: Serving
) -> None:
    servers, ps = job
    step(ps)
    words = ["follow", "--to", "versions", "--servers", servers, "--once", "--config", "config.json"]

    assert main([*words, *recipe("load_sglang.py")]) == 0

    ((path, body),) = serving.calls
    assert (path, serving.weights) == ("/update_weights_from_disk", -1.0)
    assert body == {
        "model_path": str(Path("versions/version-00000001").absolute()),
        "weight_version": "1",
        "flush_cache": True,
    }


def test_a_server_that_refuses_makes_the_command_fail(
    job: tuple[str, psd_client.ParameterServer],
    recipe: Callable[[str], list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    serving: Serving,
) -> None:
    servers, _ = job
    monkeypatch.setenv("SGLANG_URL", os.environ["VLLM_URL"] + "/nowhere")
    words = ["follow", "--to", "versions", "--servers", servers, "--once", "--config", "config.json"]

    assert main([*words, *recipe("load_sglang.py")]) == 1

    assert "version-00000000: the command ended with status 1" in capfd.readouterr().err
    assert [path for path, _ in serving.calls] == ["/nowhere/update_weights_from_disk"]
