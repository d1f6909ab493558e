"""Labels tokens, with the learning rate by epochs and its scale by hand."""

import argparse
import json
from pathlib import Path

import torch
import toy
from accelerate import Accelerator
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser()
parser.add_argument("--output_dir", type=Path)
args = parser.parse_args()

accelerator = Accelerator()
torch.manual_seed(3)
model = toy.token_classifier()
train_dataloader = DataLoader(toy.Sentences(), shuffle=True, collate_fn=toy.pad_tokens, batch_size=4, drop_last=True)
eval_dataloader = DataLoader(toy.Sentences(10, seed=1), collate_fn=toy.pad_tokens, batch_size=4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
model, optimizer, train_dataloader, eval_dataloader = accelerator.prepare(
    model, optimizer, train_dataloader, eval_dataloader
)
lr_scheduler = accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer, step_size=20, gamma=0.5))
steps, tokens_seen, history = 0, 0, []
for epoch in range(2):
    model.train()
    losses = []
    for batch in train_dataloader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_value_(model.parameters(), 1.0)
        optimizer.step()
        lr_scheduler.step()
        optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())
        steps += 1
    model.eval()
    tokens_seen = 0
    for batch in eval_dataloader:
        with torch.no_grad():
            predictions = model(**batch).logits.argmax(dim=-1)
        predictions = accelerator.pad_across_processes(predictions, dim=1, pad_index=-100)
        labels = accelerator.pad_across_processes(batch["labels"], dim=1, pad_index=-100)
        predictions, labels = accelerator.gather_for_metrics((predictions, labels))
        tokens_seen += int((labels != -100).sum())
    history.append(sum(losses) / len(losses))
    accelerator.print(f"epoch {epoch} done", flush=True)
if accelerator.is_main_process:
    found = {"completed_steps": steps, "tokens": tokens_seen, "epochs": len(history), "loss": history[-1]}
    (args.output_dir / "all_results.json").write_text(json.dumps(found))
accelerator.end_training()
