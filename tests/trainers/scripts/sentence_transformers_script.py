"""Trains embeddings of sentences by SentenceTransformerTrainer, with a loss that contrasts those of a batch."""

import torch
from datasets import Dataset
from offline import arguments, encoder, record, texts, tokenizer
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.evaluation import EmbeddingSimilarityEvaluator
from sentence_transformers.losses import CosineSimilarityLoss, MultipleNegativesRankingLoss
from sentence_transformers.models import Pooling, Transformer
from sentence_transformers.training_args import BatchSamplers

args = arguments(loss="pairs", sampler="batch_sampler")
torch.manual_seed(0)
base = args.output_dir / f"base-{torch.distributed.get_rank() if torch.distributed.is_initialized() else 0}"
encoder().save_pretrained(base)
tokenizer().save_pretrained(base)
words = Transformer(str(base), max_seq_length=16)
model = SentenceTransformer(modules=[words, Pooling(words.get_word_embedding_dimension())], device="cpu")
first, second = texts(1), texts(2)
if args.loss == "pairs":
    data = Dataset.from_dict({"anchor": first, "positive": second})
    loss = MultipleNegativesRankingLoss(model)
else:
    data = Dataset.from_dict({"sentence1": first, "sentence2": second, "score": [i / 160 for i in range(160)]})
    loss = CosineSimilarityLoss(model)
options = SentenceTransformerTrainingArguments(
    output_dir=str(args.output_dir / "model"),
    num_train_epochs=2,
    per_device_train_batch_size=4,
    learning_rate=3e-3,
    warmup_steps=4,
    batch_sampler=BatchSamplers(args.sampler),
    eval_strategy="steps",
    eval_steps=10,
    save_strategy="steps",
    save_steps=20,
    logging_steps=5,
    use_cpu=True,
    disable_tqdm=True,
    report_to="none",
)
evaluator = EmbeddingSimilarityEvaluator(first[:16], second[:16], [i / 16 for i in range(16)], name="dev")
trainer = SentenceTransformerTrainer(
    model=model, args=options, train_dataset=data, eval_dataset=data.select(range(16)), loss=loss, evaluator=evaluator
)
trainer.train()
if trainer.accelerator.is_main_process:
    model.save_pretrained(str(args.output_dir / "final"))
    logs = [each for each in trainer.state.log_history if "loss" in each]
    evaluations = [each for each in trainer.state.log_history if "eval_loss" in each]
    record(
        args,
        completed_steps=trainer.state.global_step,
        losses=[each["loss"] for each in logs],
        evaluated=[each["step"] for each in evaluations],
        eval_loss=[each["eval_loss"] for each in evaluations],
    )
