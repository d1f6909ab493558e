"""Fine-tune T5 to summarize, with ``Seq2SeqTrainer``; an elastic run needs no other script than a single machine.

python train.py --model t5-small --dataset cnn_dailymail
python train.py --model tiny --dataset reports        # without a hub: a new, tiny model and 240 articles of the sample
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from reports import articles
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    ByT5Tokenizer,
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    set_seed,
)

PREFIX = "summarize: "


def load_model(name: str) -> tuple[Any, Any]:
    """Return a model and its tokenizer."""
    if name != "tiny":
        return AutoModelForSeq2SeqLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)
    tokenizer = ByT5Tokenizer()  # bytes: it needs no vocabulary
    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=2,
        num_heads=4,
    )
    config.decoder_start_token_id = tokenizer.pad_token_id
    return T5ForConditionalGeneration(config), tokenizer


def load_articles(name: str) -> Any:
    """Return articles with their summaries."""
    if name == "reports":
        return articles()
    from datasets import load_dataset

    return load_dataset(name, "3.0.0" if name == "cnn_dailymail" else None, split="train")


class Summaries:
    """Tokenized articles; tokens of their summaries are the labels."""

    def __init__(self, rows: Any, tokenizer: Any, source_length: int, target_length: int) -> None:
        self.rows, self.tokenizer = rows, tokenizer
        self.source_length, self.target_length = source_length, target_length

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.rows[index]
        source = self.tokenizer(PREFIX + row["article"], max_length=self.source_length, truncation=True)
        target = self.tokenizer(text_target=row["highlights"], max_length=self.target_length, truncation=True)
        return {"input_ids": source["input_ids"], "labels": target["input_ids"]}


def main() -> None:
    """Train, and save the model and the log."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="t5-small")
    parser.add_argument("--dataset", default="cnn_dailymail")
    parser.add_argument("--output-dir", type=Path, default=Path("outputs"))
    parser.add_argument("--epochs", type=float, default=3)
    parser.add_argument("--batch-size", type=int, default=8, help="samples of a device in a forward pass")
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--source-length", type=int, default=512)
    parser.add_argument("--target-length", type=int, default=64)
    options = parser.parse_args()

    set_seed(0)
    model, tokenizer = load_model(options.model)
    data = Summaries(load_articles(options.dataset), tokenizer, options.source_length, options.target_length)
    trainer = Seq2SeqTrainer(
        model=model,
        args=Seq2SeqTrainingArguments(
            output_dir=str(options.output_dir),
            per_device_train_batch_size=options.batch_size,
            num_train_epochs=options.epochs,
            learning_rate=options.learning_rate,
            warmup_steps=10,
            logging_steps=1,
            save_strategy="no",
            disable_tqdm=True,
            report_to=[],
        ),
        train_dataset=data,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
    )
    trainer.train()
    trainer.save_model()
    trainer.save_state()


if __name__ == "__main__":
    main()
