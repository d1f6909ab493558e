"""Fine-tunes a small classifier with ``Trainer``, as the documentation of transformers shows it.

It records the samples that it trains, what it logs, and the final weights in the folder that it is given.
"""

import argparse
import json
import os
import time
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

parser = argparse.ArgumentParser()
parser.add_argument("--folder", type=Path)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--samples", type=int, default=1000)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--pause", type=float, default=0.02)
parser.add_argument("--loss", choices=["mean", "ignored", "divided"], default="mean")
parser.add_argument("--dropout", type=float, default=0.1)
parser.add_argument("--zero", type=int, help="stage of DeepSpeed's ZeRO")
parser.add_argument("--fsdp", type=int, help="version of FSDP")
parser.add_argument("--replicas", type=int, default=1, help="of a model that FSDP shards")
parser.add_argument("--folders", default="SHARDED_STATE_DICT", help="kind of the state that FSDP saves")
options = parser.parse_args()

sharding = {}
if options.fsdp is not None:
    import fsdp_on_cpus  # noqa: F401

    config = {"fsdp_version": options.fsdp, "transformer_layer_cls_to_wrap": "BertLayer"}
    sharding = {"fsdp": "full_shard", "fsdp_config": {**config, "state_dict_type": options.folders}}
    if options.replicas > 1:
        from accelerate.utils import ParallelismConfig  # which the oldest supported releases lack

        sharding["parallelism_config"] = ParallelismConfig(dp_replicate_size=options.replicas, dp_shard_size=2)

deepspeed = None
if options.zero is not None:
    deepspeed = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "zero_optimization": {"stage": options.zero},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}},
    }


class Sentences(Dataset):
    """Sentences whose class is whether their mean token is above the middle."""

    def __init__(self, count):
        self.tokens = torch.randint(5, 100, (count, 16), generator=torch.Generator().manual_seed(count))
        self.classes = (self.tokens.float().mean(1) > 52).long()

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": self.classes[index], "index": torch.tensor(index)}


class Classifier(BertForSequenceClassification):
    """A classifier that records what it is trained on."""

    def forward(self, input_ids=None, labels=None, index=None, num_items_in_batch=None):
        if self.training:
            with (options.folder / f"seen.{os.getpid()}").open("a") as file:
                file.write(json.dumps(index.tolist()) + "\n")
            time.sleep(options.pause)
        result = super().forward(input_ids=input_ids, labels=labels)
        if options.loss == "divided" and num_items_in_batch is not None:
            result["loss"] = (
                torch.nn.functional.cross_entropy(result.logits, labels, reduction="sum") / num_items_in_batch
            )
        return result


if options.loss != "mean":
    Classifier.accepts_loss_kwargs = True  # "ignored": nevertheless the loss is a mean, as that of T5


torch.manual_seed(0)
model = Classifier(
    BertConfig(
        vocab_size=100,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        hidden_dropout_prob=options.dropout,
        attention_probs_dropout_prob=options.dropout,
    )
)
arguments = TrainingArguments(
    output_dir=str(options.folder / "output"),
    per_device_train_batch_size=8,
    gradient_accumulation_steps=options.accumulate,
    num_train_epochs=options.epochs,
    deepspeed=deepspeed,
    **sharding,
    learning_rate=1e-3,
    logging_steps=1,
    save_steps=20,
    save_total_limit=2,
    eval_strategy="epoch",
    report_to=[],
    remove_unused_columns=False,
    disable_tqdm=True,
    dataloader_pin_memory=False,
    ddp_timeout=7200,
)
trainer = Trainer(model=model, args=arguments, train_dataset=Sentences(options.samples), eval_dataset=Sentences(100))
output = Path(arguments.output_dir)
result = trainer.train(resume_from_checkpoint=get_last_checkpoint(output) if output.is_dir() else None)
weights = model.state_dict() if options.fsdp is None else trainer.accelerator.get_state_dict(trainer.model)
if trainer.is_world_process_zero():
    torch.save(weights, options.folder / "model.pt")
    record = {"log": trainer.state.log_history, "max_steps": trainer.state.max_steps, "loss": result.training_loss}
    group = torch.distributed.group.WORLD._get_backend(torch.device("cpu"))
    record["timeout"] = group.options._timeout.total_seconds()
    (options.folder / "record.json").write_text(json.dumps(record))
