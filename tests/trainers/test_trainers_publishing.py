"""TRL's trainer publishes its adapter while another process samples with it: the programs of docs/publishing.md."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import safetensors.torch
import tokenizers
import torch
import transformers
from markdown_blocks import blocks
from source_tree import ROOT

import psd_client

VOCABULARY, SAMPLES, BATCH = 40, 24, 8
STEPS = 2 * SAMPLES // BATCH
LLAMA = transformers.LlamaConfig(
    vocab_size=VOCABULARY,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    max_position_embeddings=24,
    bos_token_id=0,
    eos_token_id=0,
)
TIMEOUT_S = 500
pytestmark = [
    pytest.mark.process,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # PEFT still asks
]


def prepare(place: Path) -> None:
    """The programs of the page, a tiny base model with its tokenizer, and texts."""
    for block in blocks(ROOT / "docs" / "publishing.md"):
        if block.title in ("train_policy.py", "sample.py"):
            (place / block.title).write_text(block.text)
    transformers.set_seed(5)
    transformers.LlamaForCausalLM(LLAMA).save_pretrained(place / "base")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"{n}": n for n in range(VOCABULARY)}, unk_token="0"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="0").save_pretrained(place / "base")
    source = torch.Generator().manual_seed(1)
    texts = [torch.randint(1, VOCABULARY, (12,), generator=source).tolist() for _ in range(SAMPLES)]
    lines = [json.dumps({"text": " ".join(map(str, text))}) for text in texts]
    (place / "texts.jsonl").write_text("\n".join(lines))


def tokens_of(base: Path, adapter: dict[str, torch.Tensor], version: int) -> list[int]:
    """The sample that the program makes with this adapter."""
    lora = peft.LoraConfig(task_type="CAUSAL_LM", r=8, target_modules="all-linear")
    model = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(base), lora).eval()
    peft.set_peft_model_state_dict(model, adapter)
    torch.manual_seed(version)
    prompt = torch.tensor([[1, 2, 3]])
    tokens: list[int] = model.generate(prompt, do_sample=True, max_new_tokens=8, pad_token_id=0)[0].tolist()
    return tokens


def test_samples_are_of_the_adapter_of_the_step_that_they_name(cluster: Callable[..., Any], tmp_path: Path) -> None:
    """The reader gets every bit of what TRL has stored itself at that step."""
    prepare(tmp_path)
    servers = cluster(2).servers
    environ = {
        **os.environ,
        "PSD_SERVERS": servers,
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HOME": str(tmp_path),
    }
    with subprocess.Popen(
        [sys.executable, "sample.py", "base", str(STEPS)], cwd=tmp_path, env=environ, stdout=subprocess.PIPE, text=True
    ) as sampling:
        try:
            train = [sys.executable, "train_policy.py", "base", "texts.jsonl"]
            done = subprocess.run(
                train, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
            )
            assert done.returncode == 0, done.stderr[-4000:]
            out, _ = sampling.communicate(timeout=TIMEOUT_S)
        finally:
            sampling.kill()
    assert sampling.returncode == 0

    samples = [json.loads(line) for line in out.splitlines()]
    assert samples[-1]["step"] == STEPS
    assert [sample["version"] for sample in samples] == [sample["step"] + 1 for sample in samples]
    assert len({sample["digest"] for sample in samples}) == len(samples)
    with psd_client.connect(servers, role="reader", wait_timeout=60) as reader:
        newest = reader.pull()
    assert newest.digest == samples[-1]["digest"]
    for sample in samples:
        if sample["step"]:
            stored = tmp_path / "out" / f"checkpoint-{sample['step']}" / "adapter_model.safetensors"
            adapter = safetensors.torch.load_file(stored)
            assert sample["tokens"] == tokens_of(tmp_path / "base", adapter, sample["version"])
    assert all(torch.equal(torch.from_numpy(newest[name]), value) for name, value in adapter.items())
    assert adapter.keys() == newest.keys()
