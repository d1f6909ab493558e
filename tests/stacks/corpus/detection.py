"""Detection in the shape of torchvision's: lists of images of several sizes, and of targets; the model gives losses."""

import argparse
import json
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--output_dir", type=Path)
args = parser.parse_args()


class Images(Dataset):
    def __init__(self, count=200):
        generator = torch.Generator().manual_seed(0)
        self.images = [torch.randn(3, 6 + n % 3, 6, generator=generator) for n in range(count)]
        self.boxes = [torch.rand(1 + n % 4, 4, generator=generator) for n in range(count)]

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.images[index], {"boxes": self.boxes[index], "labels": torch.ones(len(self.boxes[index]))}


def collate(rows):
    return tuple(zip(*rows, strict=True))


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8, 4)

    def forward(self, images, targets):
        features = torch.stack([self.body(image[None]).mean((2, 3))[0] for image in images])
        boxes = torch.stack([target["boxes"].mean(0) for target in targets])
        labels = torch.stack([target["labels"].sum() for target in targets])
        found = self.head(features)
        return {"box": nn.functional.mse_loss(found, boxes), "label": nn.functional.mse_loss(found.sum(1), labels)}


accelerator = Accelerator()
torch.manual_seed(1)
model = Detector()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
loader = DataLoader(Images(), batch_size=2, shuffle=True, collate_fn=collate)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
device, steps = accelerator.device, 0
# One epoch: what observes it knows a batch by its first image, which another epoch has among those of another batch.
for batch in loader:
    images = [image.to(device) for image in batch[0]]
    targets = [{k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in t.items()} for t in batch[1]]
    loss = sum(loss for loss in model(images, targets).values())
    optimizer.zero_grad()
    accelerator.backward(loss)
    optimizer.step()
    steps += 1
if accelerator.is_main_process:
    (args.output_dir / "all_results.json").write_text(json.dumps({"completed_steps": steps}))
