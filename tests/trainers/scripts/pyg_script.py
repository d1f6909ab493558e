"""Classifies graphs by PyTorch Geometric, whose batches are joined graphs, in a loop with accelerate."""

import torch
from accelerate import Accelerator
from offline import SAMPLES, arguments, record
from torch import nn
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GCNConv, global_mean_pool

args = arguments(epochs=2)
accelerator = Accelerator()
torch.manual_seed(0)
draw = torch.Generator().manual_seed(1)
graphs = []
for index in range(SAMPLES):
    nodes = 3 + index % 4
    edges = torch.randint(0, nodes, (2, 2 * nodes), generator=draw)
    x = torch.randn(nodes, 4, generator=draw)
    graphs.append(Data(x=x, edge_index=edges, y=torch.tensor([int(x.sum() > 0)])))


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = GCNConv(4, 16), GCNConv(16, 16)
        self.head = nn.Linear(16, 2)

    def forward(self, x, edge_index, batch):
        x = self.first(x, edge_index).relu()
        x = self.second(x, edge_index).relu()
        return self.head(global_mean_pool(x, batch))


model = Network()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
loader = DataLoader(graphs, batch_size=4, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
steps, losses = 0, []
for _ in range(args.epochs):
    model.train()
    total = 0.0
    for data in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(data.x, data.edge_index, data.batch), data.y)
        accelerator.backward(loss)
        optimizer.step()
        steps += 1
        total += loss.item() * data.num_graphs
    losses.append(total)
if accelerator.is_main_process:
    torch.save(accelerator.unwrap_model(model).state_dict(), args.output_dir / "model.pt")
    record(args, completed_steps=steps, losses=losses)
