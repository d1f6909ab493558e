"""Computes the metrics of an epoch by evaluate, from a metric's module on disk, as accelerate's example does."""

import evaluate
import torch
from accelerate import Accelerator
from offline import Points, arguments, record
from torch import nn
from torch.utils.data import DataLoader

args = arguments(epochs=2)
MODULE = """
import datasets
import evaluate


class Hits(evaluate.Metric):
    def _info(self):
        features = datasets.Features({"predictions": datasets.Value("int64"), "references": datasets.Value("int64")})
        return evaluate.MetricInfo(description="", citation="", features=features)

    def _compute(self, predictions, references):
        return {"hits": sum(int(a == b) for a, b in zip(predictions, references)), "of": len(references)}
"""
accelerator = Accelerator()
module = args.output_dir / "hits" / "hits.py"
if accelerator.is_main_process and not module.exists():
    module.parent.mkdir()
    module.write_text(MODULE)
accelerator.wait_for_everyone()
metric = evaluate.load(str(module), cache_dir=str(args.output_dir / f"cache-{accelerator.process_index}"))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
loader = DataLoader(Points(classes=3), batch_size=4, shuffle=True)
evaluation = DataLoader(Points(classes=3, seed=1, count=40), batch_size=4)
model, optimizer, loader, evaluation = accelerator.prepare(model, optimizer, loader, evaluation)
steps, found = 0, []
for _ in range(args.epochs):
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        accelerator.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()
        steps += 1
    model.eval()
    for x, y in evaluation:
        with torch.no_grad():
            predictions = model(x).argmax(-1)
        predictions, references = accelerator.gather_for_metrics((predictions, y))
        metric.add_batch(predictions=predictions, references=references)
    found.append(metric.compute())
if accelerator.is_main_process:
    record(args, completed_steps=steps, hits=[each["hits"] for each in found], of=[each["of"] for each in found])
