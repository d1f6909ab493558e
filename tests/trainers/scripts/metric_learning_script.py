"""Trains embeddings by pytorch-metric-learning: a miner chooses triplets, and the loss takes them by index."""

import torch
from accelerate import Accelerator
from offline import Points, arguments, record
from pytorch_metric_learning import distances, losses, miners, reducers
from torch import nn
from torch.utils.data import DataLoader

args = arguments(epochs=2)
accelerator = Accelerator()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
loader = DataLoader(Points(classes=3), batch_size=8, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
distance = distances.CosineSimilarity()
loss_function = losses.TripletMarginLoss(margin=0.2, distance=distance, reducer=reducers.MeanReducer())
miner = miners.TripletMarginMiner(margin=0.2, distance=distance, type_of_triplets="all")
steps = 0
for _ in range(2 * args.epochs):
    model.train()
    for data, labels in loader:
        optimizer.zero_grad()
        embeddings = model(data)
        indices = miner(embeddings, labels)
        loss = loss_function(embeddings, labels, indices)
        accelerator.backward(loss)
        optimizer.step()
        steps += 1
if accelerator.is_main_process:
    torch.save(accelerator.unwrap_model(model).state_dict(), args.output_dir / "model.pt")
    record(args, completed_steps=steps)
