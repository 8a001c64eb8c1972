"""Exports of transformers' models: `from_pretrained` takes them, with the config beside, and safetensors' `load_model`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers

import psd_client
import psd_client.torch as psd
from psd.cli.psdctl import main

BERT = transformers.BertConfig(
    vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, max_position_embeddings=12
)
GPT2 = transformers.GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=12, bos_token_id=0, eos_token_id=0)
IDS = torch.arange(20).reshape(2, 10)


@pytest.fixture(autouse=True)
def _stays_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def exported(cluster: Callable[..., Any], place: Path, model: transformers.PreTrainedModel) -> Path:
    """Train a model for two steps in a job; the directory with its export and config."""
    running = cluster(2, checkpoint_dir=str(place / "run"))
    with psd_client.connect(running.servers, 0, 1, wait_timeout=60) as ps:
        optimizer = psd.distribute(model, torch.optim.AdamW(model.parameters(), lr=1e-3), ps=ps)
        for _ in range(2):
            optimizer.zero_grad()
            model(IDS, labels=IDS).loss.backward()
            optimizer.step()
        optimizer.close()
    running.finish()
    model.config.save_pretrained(place / "config")
    target = place / "model"
    config = place / "config" / "config.json"
    assert main(["export", str(place / "run"), "--config", str(config), "--to", str(target)]) == 0
    return target


@pytest.mark.parametrize(
    ("kind", "config", "tied"),
    [
        (transformers.BertForMaskedLM, BERT, "cls.predictions.decoder.weight"),
        (transformers.GPT2LMHeadModel, GPT2, "lm_head.weight"),
    ],
)
def test_from_pretrained_takes_the_directory_and_load_model_the_file(
    cluster: Callable[..., Any], tmp_path: Path, kind: Any, config: Any, tied: str
) -> None:
    """Of models with tied weights; also as the model without its head."""
    model = kind(config)
    target = exported(cluster, tmp_path, model)

    found, report = kind.from_pretrained(target, output_loading_info=True)
    base = transformers.AutoModel.from_pretrained(target)
    other = kind(config)
    assert safetensors.torch.load_model(other, target / "model.safetensors") == (set(), [])

    assert not any(report[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"))
    for loaded in (found, other):
        for name, value in model.state_dict().items():
            torch.testing.assert_close(loaded.state_dict()[name], value, rtol=0, atol=0, msg=name)
    for name, value in model.base_model.state_dict().items():
        torch.testing.assert_close(base.state_dict()[name], value, rtol=0, atol=0, msg=name)
    assert found.get_output_embeddings().weight is found.get_input_embeddings().weight
    with safetensors.safe_open(target / "model.safetensors", "pt") as opened:
        assert tied not in opened.keys()  # noqa: SIM118 - it is no dict
        assert opened.metadata()[tied] in opened.keys()  # noqa: SIM118
