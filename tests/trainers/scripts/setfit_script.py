"""Trains a classifier of sentences by setfit: embeddings on pairs of a few examples, then a head on them."""

import torch
from datasets import Dataset
from offline import arguments, encoder, record, texts, tokenizer
from sentence_transformers import SentenceTransformer
from sentence_transformers.models import Pooling, Transformer
from setfit import SetFitModel, Trainer, TrainingArguments
from sklearn.linear_model import LogisticRegression

args = arguments()
torch.manual_seed(0)
base = args.output_dir / "base"
base.mkdir(exist_ok=True)
encoder().save_pretrained(base)
tokenizer().save_pretrained(base)
words = Transformer(str(base), max_seq_length=16)
body = SentenceTransformer(modules=[words, Pooling(words.get_word_embedding_dimension())], device="cpu")
model = SetFitModel(model_body=body, model_head=LogisticRegression())
sentences = texts(1, count=24)
data = Dataset.from_dict({"text": sentences, "label": [index % 2 for index in range(24)]})
options = TrainingArguments(
    output_dir=str(args.output_dir / "model"),
    batch_size=4,
    num_epochs=1,
    max_steps=40,
    sampling_strategy="oversampling",
    body_learning_rate=(1e-3, 1e-3),
    report_to="none",
    show_progress_bar=False,
    save_strategy="no",
    logging_steps=5,
)
trainer = Trainer(model=model, args=options, train_dataset=data, eval_dataset=data, metric="accuracy")
trainer.train_embeddings(*trainer.dataset_to_parameters(data), args=options)
trainer.train_classifier(*trainer.dataset_to_parameters(data), args=options)
if trainer.st_trainer.accelerator.is_main_process:
    model.save_pretrained(str(args.output_dir / "final"))
    logs = [each for each in trainer.st_trainer.state.log_history if "embedding_loss" in each or "loss" in each]
    record(args, completed_steps=trainer.st_trainer.state.global_step, logged=[each["step"] for each in logs])
