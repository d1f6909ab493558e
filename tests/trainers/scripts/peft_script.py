"""Trains adapters of a language model by transformers' Trainer, in the shape of peft's examples, and merges them."""

import torch
from offline import arguments, language_model, record, texts, tokenizer
from peft import LoraConfig, TaskType, get_peft_model
from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments

args = arguments(epochs=2)
torch.manual_seed(0)
words = tokenizer()
data = [words(text) for text in texts(1)]
config = LoraConfig(task_type=TaskType.CAUSAL_LM, r=4, lora_alpha=8, lora_dropout=0.0, target_modules=["c_attn"])
model = get_peft_model(language_model(), config)
trainer = Trainer(
    model=model,
    args=TrainingArguments(
        output_dir=str(args.output_dir / "model"),
        num_train_epochs=args.epochs,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        logging_steps=5,
        use_cpu=True,
        disable_tqdm=True,
        report_to="none",
    ),
    train_dataset=data,
    eval_dataset=data[:40],
    data_collator=DataCollatorForLanguageModeling(words, mlm=False),
)
trainer.train()
if trainer.accelerator.is_main_process:
    model.save_pretrained(str(args.output_dir / "adapter"))
    merged = model.merge_and_unload()
    norm = torch.cat([each.flatten() for each in merged.parameters()]).norm()
    record(
        args,
        completed_steps=trainer.state.global_step,
        merged=float(norm),
        losses=[each["loss"] for each in trainer.state.log_history if "loss" in each],
        eval_losses=[each["eval_loss"] for each in trainer.state.log_history if "eval_loss" in each],
    )
