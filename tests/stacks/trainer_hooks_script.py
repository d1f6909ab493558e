"""Trains with ``Trainer`` and callbacks that follow an evaluation; what they do on rank 0 is in the record.

With ``--die`` rank 0 is killed at places, once at each. With ``--evaluate`` it evaluates only: a model whose loss
ignores the number of labels in a batch, one that divides by it, and one whose data come in a random order.
"""

import argparse
import json
import os
import signal
import time
from collections import Counter
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

parser = argparse.ArgumentParser()
parser.add_argument("--folder", type=Path)
parser.add_argument("--die", nargs=2, action="append", default=[], help="place and number of the step")
parser.add_argument("--evaluate", action="store_true")
parser.add_argument("--max-steps", type=int, default=-1)
parser.add_argument("--logging-steps", type=int, default=1)
parser.add_argument("--pause", type=float, default=0.0)
options = parser.parse_args()


class Places(TrainerCallback):
    """Notes where rank 0 is, or dies there."""

    def at(self, place, state):
        if not state.is_world_process_zero:
            return
        killed = options.folder / f"killed.{place}.{state.global_step}"
        if [place, str(state.global_step)] in options.die and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        with (options.folder / f"places.{os.getpid()}").open("a") as file:
            file.write(f"{place} {state.global_step}\n")

    def on_step_end(self, args, state, control, **_):
        time.sleep(options.pause)
        self.at("step", state)

    def on_log(self, args, state, control, logs, **_):
        if "loss" in logs:
            self.at("log", state)

    def on_evaluate(self, args, state, control, **_):
        self.at("evaluation", state)

    def on_save(self, args, state, control, **_):
        self.at("save", state)

    def on_epoch_begin(self, args, state, control, **_):
        self.at("epoch_begin", state)

    def on_epoch_end(self, args, state, control, **_):
        self.at("epoch_end", state)

    def on_train_end(self, args, state, control, **_):
        self.at("train_end", state)


class RandomOrder(Trainer):
    """Evaluates in an order that each rank would draw for itself, as in a process that has joined a run."""

    def get_eval_dataloader(self, eval_dataset=None):
        torch.manual_seed(int(os.environ["RANK"]))
        data = self.eval_dataset if eval_dataset is None else eval_dataset
        return self.accelerator.prepare(DataLoader(data, batch_size=5, shuffle=True, collate_fn=self.data_collator))

    get_test_dataloader = get_eval_dataloader


def arguments(**more):
    return TrainingArguments(
        output_dir=str(options.folder / "output"),
        per_device_train_batch_size=4,
        per_device_eval_batch_size=5,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **more,
    )


def evaluations(dataset):
    """Return the results of evaluations of these kinds, and of predictions."""
    small = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 50, "n_positions": 16}
    for label, item in enumerate(sentences):
        item["labels"][: label % 7] = -100
    models = [
        (Trainer, classifier(), dataset),
        (Trainer, GPT2LMHeadModel(GPT2Config(**small)), sentences),
        (RandomOrder, classifier(), dataset),
    ]
    for kind, model, data in models:
        trainer = kind(model, arguments(), eval_dataset=data, compute_metrics=totals)
        found = trainer.evaluate()
        predicted = trainer.predict(data)
        shapes = [list(predicted.predictions.shape), list(predicted.label_ids.shape)]
        yield [found["eval_loss"], found["eval_total"], found["eval_labels"], predicted.metrics["test_loss"]], shapes


def totals(predicted):
    """Return numbers that notice a sample which is missing, repeated or in another place."""
    weights = torch.arange(1, len(predicted.predictions) + 1)
    total = (torch.tensor(predicted.predictions).flatten(1).sum(1) * weights).sum()
    return {"total": float(total), "labels": int(predicted.label_ids.sum())}


def classifier():
    config = BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        intermediate_size=16,
        hidden_dropout_prob=0,
        attention_probs_dropout_prob=0,
    )
    return BertForSequenceClassification(config)


torch.manual_seed(0)
data = [{"input_ids": torch.randint(0, 50, (8,)), "labels": index % 2} for index in range(64)]
sentences = [{"input_ids": each["input_ids"], "labels": each["input_ids"].clone()} for each in data[:23]]
if options.evaluate:
    document = {"evaluations": list(evaluations(data[:23]))}
else:
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    trainer = Trainer(
        model,
        arguments(
            num_train_epochs=10,
            max_steps=options.max_steps,
            logging_steps=options.logging_steps,
            eval_strategy="epoch",
            eval_on_start=True,
            save_strategy="epoch",
            load_best_model_at_end=True,
        ),
        train_dataset=data,
        eval_dataset=data[:23],
        compute_metrics=totals,
        optimizers=(optimizer, scheduler),
        callbacks=[Places(), EarlyStoppingCallback(2)],
    )
    result = trainer.train()
    places = [line for file in options.folder.glob("places.*") for line in file.read_text().splitlines()]
    timings = ("runtime", "per_second")
    document = {
        "log": [
            {name: value for name, value in line.items() if not name.endswith(timings)}
            for line in trainer.state.log_history
        ],
        "best": trainer.state.best_metric,
        "best_model": Path(trainer.state.best_model_checkpoint).name,
        "steps": result.global_step,
        "loss": result.training_loss,
        "kept": sorted(path.name for path in (options.folder / "output").iterdir()),
        "places": Counter(places),
    }
if int(os.environ["RANK"]) == 0:
    (options.folder / "record.json").write_text(json.dumps(document))
