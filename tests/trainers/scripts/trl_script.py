"""Fine-tunes a language model by trl: on texts, on preferences, or on rewards of what it generates."""

import copy

import torch
from datasets import Dataset
from offline import arguments, language_model, language_model_config, record, texts, tokenizer
from peft import LoraConfig
from transformers import GPT2ForSequenceClassification
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)

args = arguments(trainer="sft")
torch.manual_seed(0)
same = {
    "output_dir": str(args.output_dir / "model"),
    "per_device_train_batch_size": 4,
    "num_train_epochs": 2,
    "learning_rate": 3e-3,
    "logging_steps": 5,
    "report_to": "none",
    "save_steps": 20,
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "disable_tqdm": True,
}
prompts, chosen, rejected = texts(1), texts(2), texts(3)
preferences = {
    "prompt": prompts,
    "chosen": [f" {text}" for text in chosen],
    "rejected": [f" {text}" for text in rejected],
}
model = language_model()
reference = copy.deepcopy(model)


def few_words(completions, **_):
    return [-float(len(set(text.split()))) for text in completions]


if args.trainer in {"sft", "lora"}:
    data = Dataset.from_dict({"text": prompts})
    more = {"peft_config": LoraConfig(r=4, lora_dropout=0.0, task_type="CAUSAL_LM")} if args.trainer == "lora" else {}
    trainer = SFTTrainer(model, args=SFTConfig(**same), train_dataset=data, processing_class=tokenizer(), **more)
elif args.trainer == "dpo":
    data = Dataset.from_dict(preferences)
    trainer = DPOTrainer(model, reference, args=DPOConfig(**same), train_dataset=data, processing_class=tokenizer())
elif args.trainer == "kto":
    labels = [index % 2 == 0 for index in range(len(prompts))]
    data = Dataset.from_dict({"prompt": prompts, "completion": preferences["chosen"], "label": labels})
    trainer = KTOTrainer(model, reference, args=KTOConfig(**same), train_dataset=data, processing_class=tokenizer())
elif args.trainer == "reward":
    model = GPT2ForSequenceClassification(language_model_config(num_labels=1))
    data = Dataset.from_dict(preferences)
    trainer = RewardTrainer(model, args=RewardConfig(**same), train_dataset=data, processing_class=tokenizer())
else:
    kind, config = {"grpo": (GRPOTrainer, GRPOConfig), "rloo": (RLOOTrainer, RLOOConfig)}[args.trainer]
    data = Dataset.from_dict({"prompt": prompts[:80]})
    online = config(**same, num_generations=4, max_completion_length=4, beta=0.0)
    trainer = kind(model, reward_funcs=few_words, args=online, train_dataset=data, processing_class=tokenizer())
result = trainer.train()
trainer.save_model(str(args.output_dir / "final"))
if trainer.accelerator.is_main_process:
    logs = [each for each in trainer.state.log_history if "loss" in each]
    found = {
        "completed_steps": trainer.state.global_step,
        "epoch": trainer.state.epoch,
        "losses": [each["loss"] for each in logs],
        "steps": [each["step"] for each in logs],
    }
    if args.trainer in {"sft", "lora", "dpo", "reward"}:
        found["tokens"] = logs[-1].get("num_tokens")
    record(args, **found)
