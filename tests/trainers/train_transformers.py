"""A program for test_trainers_transformers.py: trains a small GPT-2 with transformers.Trainer, and stores what it has learnt.

python train_transformers.py DIRECTORY BATCH WAY...; BATCH: samples of a step on one worker. Ways: "alone", without psd;
"save" each third step; "best": load the best model at the end, which is not the last; "resume" from the Trainer's checkpoint,
which psd refuses; "stop" early on worker 1; "die" once at the seventh step, on worker 0; "kill" both shards, one after the
other; "sft", with TRL's trainer.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from commands import shard_pid
from datasets import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from psd_client.integrations import transformers as psd_transformers

SAMPLES, STEPS, VOCABULARY = 48, 12, 50
RANK = int(os.environ.get("PSD_RANK", "0"))


class Dying(TrainerCallback):
    """Kills the process, once."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def on_step_end(self, args, state, control, **others) -> None:
        if state.global_step == 7 and RANK == 0 and not self._mark.exists():
            self._mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


class Killing(TrainerCallback):
    """Kills shards, from one worker."""

    def on_step_end(self, args, state, control, **others) -> None:
        if RANK == 0 and state.global_step in (3, 7):
            os.kill(shard_pid(os.environ["PSD_RUN_ID"], state.global_step // 4), signal.SIGKILL)


class Stopping(TrainerCallback):
    """Stops one worker early."""

    def on_step_end(self, args, state, control, **others) -> None:
        control.should_training_stop = control.should_training_stop or (RANK == 1 and state.global_step == 4)


def main() -> None:
    directory, batch, ways = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    transformers.set_seed(3)
    config = GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=VOCABULARY, n_positions=16, bos_token_id=0, eos_token_id=0)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    model = GPT2LMHeadModel(config)
    source = torch.Generator().manual_seed(1)
    texts = [torch.randint(0, VOCABULARY, (12,), generator=source).tolist() for _ in range(SAMPLES)]
    settings = {
        "output_dir": str(directory / "out"),
        "per_device_train_batch_size": batch,
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "steps" if "save" in ways else "no",
        "save_steps": 3,
        "optim": "adamw_torch",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
    }
    if "best" in ways:
        settings |= {"save_strategy": "epoch", "eval_strategy": "epoch", "load_best_model_at_end": True, "num_train_epochs": 3}
        settings |= {"metric_for_best_model": "loss", "greater_is_better": True}  # so the best is the first
    if "sft" in ways:
        trainer = sft_trainer(model, texts, settings)
    else:
        data = [{"input_ids": torch.tensor(text), "labels": torch.tensor(text)} for text in texts]
        trainer = Trainer(model=model, args=TrainingArguments(**settings), train_dataset=data, eval_dataset=data[:8])
    if "die" in ways:
        trainer.add_callback(Dying(directory / "died"))
    if "kill" in ways:
        trainer.add_callback(Killing())
    if "stop" in ways:
        trainer.add_callback(Stopping())
    if "alone" not in ways:
        psd_transformers.distribute(trainer)
    if "resume" in ways:
        trainer.train(resume_from_checkpoint=True)
    result = trainer.train()
    if "save" in ways:
        trainer.save_model(str(directory / f"model-of-{RANK}"))
    values = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    np.savez(directory / f"trained-{RANK}.npz", steps=result.global_step, **values)


def sft_trainer(model: GPT2LMHeadModel, texts: list[list[int]], settings: dict) -> Trainer:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = Tokenizer(models.WordLevel({f"{number}": number for number in range(VOCABULARY)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="0")
    data = Dataset.from_dict({"text": [" ".join(map(str, text)) for text in texts]})
    return SFTTrainer(
        model=model, args=SFTConfig(**settings, bf16=False, max_length=16), train_dataset=data, processing_class=tokenizer
    )


if __name__ == "__main__":
    main()
