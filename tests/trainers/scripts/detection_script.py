"""Trains a detector as torchvision's are: lists of images of several sizes, and losses by their names."""

import torch
from accelerate import Accelerator
from offline import SAMPLES, arguments, record
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Boxes(Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        draw = torch.Generator().manual_seed(index)
        image = torch.rand(3, 10 + index % 3, 12, generator=draw)
        boxes = torch.rand(1 + index % 3, 4, generator=draw)
        return image, {"boxes": boxes, "labels": torch.randint(0, 3, (len(boxes),), generator=draw)}


class Detector(nn.Module):
    """Returns losses in training and boxes otherwise, as those of torchvision do."""

    def __init__(self):
        super().__init__()
        self.body, self.boxes, self.classes = nn.Conv2d(3, 8, 3), nn.Linear(8, 4), nn.Linear(8, 3)

    def forward(self, images, targets=None):
        features = torch.stack([self.body(image[None]).relu().mean((2, 3))[0] for image in images])
        boxes, scores = self.boxes(features), self.classes(features)
        if not self.training:
            return [{"boxes": each[None], "scores": score} for each, score in zip(boxes, scores, strict=True)]
        wanted = torch.stack([target["boxes"].mean(0) for target in targets])
        labels = torch.stack([target["labels"][0] for target in targets])
        return {
            "loss_box_reg": nn.functional.l1_loss(boxes, wanted),
            "loss_classifier": nn.functional.cross_entropy(scores, labels),
        }


args = arguments(batch_size=4)
accelerator = Accelerator()
torch.manual_seed(0)
model = Detector()
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
loader = DataLoader(
    Boxes(), batch_size=args.batch_size, shuffle=True, collate_fn=lambda batch: tuple(zip(*batch, strict=True))
)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
warmup = torch.optim.lr_scheduler.LinearLR(optimizer.optimizer, start_factor=0.1, total_iters=10)
warmup = accelerator.prepare(warmup)
steps = 0
for _ in range(2):
    model.train()
    for images, targets in loader:
        inputs = [image.to(accelerator.device) for image in images]
        wanted = [{name: value.to(accelerator.device) for name, value in target.items()} for target in targets]
        losses = sum(model(inputs, wanted).values())
        optimizer.zero_grad()
        accelerator.backward(losses)
        optimizer.step()
        warmup.step()
        steps += 1
if accelerator.is_main_process:
    torch.save(accelerator.unwrap_model(model).state_dict(), args.output_dir / "model.pt")
    record(args, completed_steps=steps)
