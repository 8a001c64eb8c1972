"""Adapters of PEFT, written by psdctl follow: PEFT loads them, and the rollout loop of docs/following.md samples with them."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import safetensors.torch
import torch
import transformers
from markdown_blocks import blocks
from source_tree import ROOT
from waiting import wait_until

import psd_client
import psd_client.torch as psd
from psd.cli.psdctl import main

GPT2 = transformers.GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=24, bos_token_id=0, eos_token_id=0)
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT still asks
IDS = torch.arange(20).reshape(2, 10)


@pytest.fixture(autouse=True)
def _stays_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("psd.cli.follow.follower.LOOK_S", 0.5)
    monkeypatch.setattr("psd.cli.follow.follower.RECONNECT_S", 0.5)


def adapted(base: Path) -> peft.PeftModel:
    """A tiny model with an adapter, of which the base is stored, too."""
    transformers.GPT2LMHeadModel(GPT2).save_pretrained(base)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["c_attn"], fan_in_fan_out=True)
    return peft.get_peft_model(transformers.GPT2LMHeadModel.from_pretrained(base), config)


def test_each_version_of_an_adapter_is_one_that_peft_loads_and_rollouts_say_which(
    cluster: Callable[..., Any], tmp_path: Path
) -> None:
    """A trainer on shards, a follower, and a program that samples: what it loads has the trainer's bits of that version."""
    base, place, out = tmp_path / "base", tmp_path / "adapters", tmp_path / "samples"
    model = adapted(base)
    model.peft_config["default"].save_pretrained(tmp_path)
    (program,) = (block.text for block in blocks(ROOT / "docs" / "following.md") if block.title == "rollouts.py")
    (tmp_path / "rollouts.py").write_text(program)
    servers = cluster(2).servers
    words = ["--to", str(place), "--servers", servers, "--keep", "9", "--format", "peft"]
    words += ["--adapter-config", str(tmp_path / "adapter_config.json")]
    trained = []
    with psd_client.connect(servers, 0, 1, wait_timeout=60) as ps:
        options = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = psd.distribute(model, torch.optim.AdamW(options, lr=1e-2), ps=ps)
        following = threading.Thread(target=main, args=(["follow", *words],))
        following.start()
        for version in range(3):
            wait_until(lambda version=version: (place / f"version-{version:08}").is_dir(), f"version {version}")
            trained.append({name: value.clone() for name, value in peft.get_peft_model_state_dict(model).items()})
            samples = [sys.executable, "rollouts.py", str(base), str(place), str(out), "2"]
            subprocess.run(samples, cwd=tmp_path, check=True, timeout=300)
            optimizer.zero_grad()
            model(IDS, labels=IDS).loss.backward()
            optimizer.step()
        optimizer.close()
    following.join(100)

    for version, expected in enumerate(trained):
        found = safetensors.torch.load_file(place / f"version-{version:08}" / "adapter_model.safetensors")
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items()), version
        again = peft.PeftModel.from_pretrained(
            transformers.GPT2LMHeadModel.from_pretrained(base), str(place / f"version-{version:08}")
        )
        loaded = peft.get_peft_model_state_dict(again)
        assert all(torch.equal(loaded[name], value) for name, value in expected.items())
    said = [json.loads(line) for line in out.read_text().splitlines()]
    assert [sample["version"] for sample in said] == [f"version-{n:08}" for n in (0, 0, 1, 1, 2, 2)]
    assert all(len(sample["tokens"]) > 3 for sample in said)
