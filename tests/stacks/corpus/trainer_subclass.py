"""A Trainer with a loss of its own: evaluation, the best model, a plateau of the learning rate, an early stop."""

import argparse
import json
from pathlib import Path

import torch
import toy
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments, set_seed

parser = argparse.ArgumentParser()
parser.add_argument("--output_dir", type=Path)
args = parser.parse_args()


class WeighedTrainer(Trainer):
    """Weighs the classes."""

    def compute_loss(self, model, inputs, return_outputs=False, **_):
        outputs = model(**inputs)
        weights = torch.tensor([1.0, 1.5], device=outputs.logits.device)
        loss = nn.functional.cross_entropy(outputs.logits, inputs["labels"], weight=weights)
        return (loss, outputs) if return_outputs else loss


class Steps(TrainerCallback):
    """Counts what the Trainer tells, and keeps an average of the weights."""

    def on_train_begin(self, args, state, control, model=None, **_):
        self.average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self.updates, self.remainders = 0, []

    def on_step_end(self, args, state, control, model=None, **_):
        self.average.update_parameters(model)
        self.updates += 1
        self.remainders.append(self.updates % 3)

    def on_train_end(self, args, state, control, **_):
        self.steps = state.global_step


set_seed(21)
steps = Steps()
trainer = WeighedTrainer(
    model=toy.sequence_classifier(),
    args=TrainingArguments(
        output_dir=args.output_dir / "out",
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        num_train_epochs=3,
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        warmup_steps=5,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=2,
        logging_steps=5,
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
    ),
    train_dataset=toy.Sentences(),
    eval_dataset=toy.Sentences(37, seed=1),
    data_collator=toy.pad,
    compute_metrics=lambda found: {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())},
    callbacks=[EarlyStoppingCallback(early_stopping_patience=5), steps],
)
trainer.train()
metrics = trainer.evaluate()
if trainer.is_world_process_zero():
    logged = [each["step"] for each in trainer.state.log_history if "loss" in each]
    evaluated = [each["step"] for each in trainer.state.log_history if "eval_loss" in each]
    found = {"completed_steps": steps.steps, "logged": logged, "evaluated": evaluated, "loss": metrics["eval_loss"]}
    norm = float(torch.cat([each.flatten() for each in steps.average.module.parameters()]).norm())
    found |= {"average": norm, "counts": [int(steps.average.n_averaged), steps.updates, sum(steps.remainders)]}
    (args.output_dir / "all_results.json").write_text(json.dumps(found))
