"""Small data and models in the form of those that the public examples load."""

import os
import signal

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertForTokenClassification,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
)

SAMPLES = 160
WORDS = 32


class Sentences(Dataset):
    """Sentences of different lengths as lists of tokens, with a label each, as a tokenizer returns them."""

    def __init__(self, count=SAMPLES, seed=0):
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(4, 9, (count,), generator=generator).tolist()
        self.tokens = [torch.randint(3, WORDS, (length,), generator=generator).tolist() for length in lengths]

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        tokens = self.tokens[index]
        return {"input_ids": tokens, "attention_mask": [1] * len(tokens), "labels": int(sum(tokens) % 2)}


def pad(samples):
    """Return a padded batch."""
    longest = max(len(each["input_ids"]) for each in samples)
    batch = {
        name: torch.tensor([each[name] + [0] * (longest - len(each[name])) for each in samples])
        for name in ("input_ids", "attention_mask")
    }
    return {**batch, "labels": torch.tensor([each["labels"] for each in samples])}


def pad_tokens(samples):
    """Return a padded batch with a label for each token."""
    batch = pad(samples)
    batch["labels"] = torch.where(batch["attention_mask"] == 1, batch["input_ids"] % 3, -100)
    return batch


class Blocks(Dataset):
    """Blocks of tokens, as a grouped text has them."""

    def __init__(self, count=SAMPLES, seed=0):
        self.tokens = torch.randint(3, WORDS, (count, 8), generator=torch.Generator().manual_seed(seed))

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


class Points(Dataset):
    """Points, with the sum of their coordinates or whether it is positive."""

    def __init__(self, count=SAMPLES, seed=0, classes=False):
        self.points = torch.randn(count, 8, generator=torch.Generator().manual_seed(seed))
        total = self.points.sum(1)
        self.targets = (total > 0).long() if classes else total[:, None]

    def __len__(self):
        return len(self.points)

    def __getitem__(self, index):
        return self.points[index], self.targets[index]


def die_once(accelerator, marker):
    """Kill rank 0, unless the marker says that this was done."""
    if accelerator.is_main_process and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def perceptron(outputs=1):
    """Return a model of points."""
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, outputs))


# Dropout draws other numbers for each division of the samples.
_STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_TINY = {**_STILL, "vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def sequence_classifier():
    """Return a small model of sentences."""
    return BertForSequenceClassification(BertConfig(**_TINY, intermediate_size=16, num_labels=2))


def token_classifier():
    """Return a small model of tokens."""
    return BertForTokenClassification(BertConfig(**_TINY, intermediate_size=16, num_labels=3))


def language_model():
    """Return a small causal language model."""
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=WORDS,
            n_embd=16,
            n_layer=1,
            n_head=2,
            n_positions=16,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    )


def translator():
    """Return a small model of two sequences."""
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=WORDS,
            d_model=16,
            d_kv=8,
            d_ff=16,
            num_layers=1,
            num_heads=2,
            decoder_start_token_id=0,
            dropout_rate=0.0,
        )
    )
