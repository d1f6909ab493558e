"""A Trainer of a language model: accumulated gradients, a limit of steps, and checkpoints that it continues from."""

import argparse
import json
from pathlib import Path

import torch
import toy
from transformers import Trainer, TrainingArguments, default_data_collator, set_seed
from transformers.trainer_utils import get_last_checkpoint

parser = argparse.ArgumentParser()
parser.add_argument("--output_dir", type=Path)
args = parser.parse_args()

set_seed(22)
out = args.output_dir / "out"
last_checkpoint = get_last_checkpoint(out) if out.is_dir() else None
trainer = Trainer(
    model=toy.language_model(),
    args=TrainingArguments(
        output_dir=out,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=45,
        learning_rate=1e-3,
        save_steps=10,
        logging_steps=1,
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
    ),
    train_dataset=toy.Blocks(),
    data_collator=default_data_collator,
)
result = trainer.train(resume_from_checkpoint=last_checkpoint)
if trainer.is_world_process_zero():
    trainer.save_model()
    logged = [each["step"] for each in trainer.state.log_history if "loss" in each]
    found = {"completed_steps": result.global_step, "logged": logged, "epoch": trainer.state.epoch}
    (args.output_dir / "all_results.json").write_text(json.dumps(found))
