"""Trains a small classifier with transformers' ``Trainer``, the same script under torchrun and under this library."""

from __future__ import annotations

import os

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments
from turns import TOTAL_STEPS, Turns


class Sentences(Dataset):
    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        tokens = torch.randint(5, 1000, (64,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": (tokens.float().mean() > 500).long()}


class TakeTurns(TrainerCallback):
    def __init__(self):
        self._turns = Turns()

    def on_step_begin(self, *_, **__):
        self._turns.step()


torch.manual_seed(0)
config = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 512}
Trainer(
    model=BertForSequenceClassification(BertConfig(vocab_size=1000, **config)),
    args=TrainingArguments(
        output_dir=os.environ["BENCH_FOLDER"] + f"/output{os.environ['BENCH_SIDE']}",
        per_device_train_batch_size=8,
        max_steps=TOTAL_STEPS,
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        use_cpu=True,
        ddp_backend="gloo",
    ),
    train_dataset=Sentences(),
    callbacks=[TakeTurns()],
).train()
