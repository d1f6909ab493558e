"""Trains a segmentation by MONAI's SupervisedTrainer with its handlers, over an accelerate loader."""

import torch
from accelerate import Accelerator
from ignite.engine import Events
from monai.data import DataLoader, Dataset
from monai.engines import SupervisedEvaluator, SupervisedTrainer
from monai.handlers import MeanDice, StatsHandler, ValidationHandler, from_engine
from monai.inferers import SimpleInferer
from monai.losses import DiceLoss
from monai.networks.nets import UNet
from monai.transforms import AsDiscreted, Compose, EnsureTyped
from offline import SAMPLES, arguments, record

args = arguments(epochs=2)
accelerator = Accelerator()
torch.manual_seed(0)
images = torch.rand(SAMPLES, 1, 8, 8, generator=torch.Generator().manual_seed(1))
items = [{"image": image, "label": (image > 0.6).float()} for image in images]
transform = Compose([EnsureTyped(keys=["image", "label"])])
loader = DataLoader(Dataset(items, transform), batch_size=4, shuffle=True)
validation = DataLoader(Dataset(items[:16], transform), batch_size=4)
network = UNet(spatial_dims=2, in_channels=1, out_channels=1, channels=(4, 8), strides=(2,), norm="instance")
optimizer = torch.optim.Adam(network.parameters(), 1e-2)
model, optimizer, loader = accelerator.prepare(network, optimizer, loader)
after = Compose([AsDiscreted(keys="pred", threshold=0.0)])
evaluator = SupervisedEvaluator(
    device=accelerator.device,
    val_data_loader=validation,
    network=network,
    inferer=SimpleInferer(),
    postprocessing=after,
    key_val_metric={"dice": MeanDice(include_background=True, output_transform=from_engine(["pred", "label"]))},
)
scores, losses = [], []
evaluator.add_event_handler(Events.COMPLETED, lambda engine: scores.append(engine.state.metrics["dice"]))


class Trainer(SupervisedTrainer):
    """Goes backward by accelerate."""

    def _iteration(self, engine, batchdata):
        inputs, targets = self.prepare_batch(batchdata, engine.state.device, engine.non_blocking)
        engine.network.train()
        engine.optimizer.zero_grad()
        outputs = self.inferer(inputs, engine.network)
        loss = engine.loss_function(outputs, targets).mean()
        accelerator.backward(loss)
        engine.optimizer.step()
        return {"image": inputs, "label": targets, "pred": outputs, "loss": loss.item()}


trainer = Trainer(
    device=accelerator.device,
    max_epochs=args.epochs,
    train_data_loader=loader,
    network=model,
    optimizer=optimizer,
    loss_function=DiceLoss(sigmoid=True),
    inferer=SimpleInferer(),
    train_handlers=[
        ValidationHandler(1, evaluator),
        StatsHandler(tag_name="train_loss", output_transform=from_engine("loss", first=True)),
    ],
)
trainer.run()
if accelerator.is_main_process:
    torch.save(network.state_dict(), args.output_dir / "network.pt")
    record(args, completed_steps=trainer.state.iteration, scores=[float(each) for each in scores])
