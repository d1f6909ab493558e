"""Counts the accuracy of an epoch by torchmetrics, in a loop with accelerate and with Lightning's Trainer."""

import torch
from accelerate import Accelerator
from offline import Points, arguments, record
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import Accuracy, MeanMetric

args = arguments(epochs=2)
accelerator = Accelerator()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
loader = DataLoader(Points(classes=3), batch_size=4, shuffle=True)
evaluation = DataLoader(Points(classes=3, seed=1, count=40), batch_size=4)
model, optimizer, loader, evaluation = accelerator.prepare(model, optimizer, loader, evaluation)
accuracy, mean = Accuracy(task="multiclass", num_classes=3), MeanMetric()
score = Accuracy(task="multiclass", num_classes=3)
steps, trained, counted, evaluated = 0, [], [], []
for _ in range(args.epochs):
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        output = model(x)
        loss = nn.functional.cross_entropy(output, y)
        accelerator.backward(loss)
        optimizer.step()
        accuracy.update(output, y)
        mean.update(loss.detach(), len(y))
        steps += 1
    trained.append(float(accuracy.compute()))
    counted.append(float(mean.weight))
    accuracy.reset()
    mean.reset()
    model.eval()
    for x, y in evaluation:
        with torch.no_grad():
            output, labels = accelerator.gather_for_metrics((model(x), y))
        score.update(output, labels)
    evaluated.append(float(score.compute()))
    score.reset()
if accelerator.is_main_process:
    record(args, completed_steps=steps, trained=trained, counted=counted, evaluated=evaluated)
