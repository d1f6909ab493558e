"""Models, tokenizers and texts as the public examples load them from a hub, small and made here."""

import argparse
import json
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import Dataset
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

SAMPLES = 160
WORDS = [f"w{number}" for number in range(28)]
SPECIAL = ["<pad>", "<unk>", "<eos>", "<cls>"]

# Dropout draws other numbers for each division of the samples.
STILL = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_TINY = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64, "vocab_size": len(WORDS) + len(SPECIAL)}


def arguments(**more):
    """Return the script's arguments: its folder, and others with their values by default."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", type=Path)
    for name, value in more.items():
        parser.add_argument(f"--{name}", default=value, type=type(value))
    return parser.parse_args()


def record(args, **found):
    """Write down what the script has counted, once."""
    (args.output_dir / "all_results.json").write_text(json.dumps(found))


def tokenizer():
    """Return a tokenizer of words."""
    words = Tokenizer(models.WordLevel({word: id_ for id_, word in enumerate(SPECIAL + WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token="<eos>",
        cls_token="<cls>",
        sep_token="<eos>",
        model_max_length=32,
    )


def language_model(**more):
    """Return a small causal language model."""
    return GPT2LMHeadModel(language_model_config(**more))


def language_model_config(**more):
    """Return its configuration."""
    return GPT2Config(**_TINY, **STILL, bos_token_id=2, eos_token_id=2, pad_token_id=0, **more)


def encoder():
    """Return a small bidirectional model."""
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    return BertModel(BertConfig(vocab_size=len(WORDS) + len(SPECIAL), max_position_embeddings=32, **size, **still))


def texts(seed, count=SAMPLES, lengths=(3, 8)):
    """Return texts of different lengths."""
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(*lengths))) for _ in range(count)]


class Points(Dataset):
    """Points, with the sum of their coordinates or whether it is positive."""

    def __init__(self, count=SAMPLES, classes=0, seed=0):
        self.points = torch.randn(count, 8, generator=torch.Generator().manual_seed(seed))
        self.targets = (self.points[:, :classes].argmax(1)) if classes else self.points.sum(1, keepdim=True)

    def __len__(self):
        return len(self.points)

    def __getitem__(self, index):
        return self.points[index], self.targets[index]
