"""Trains by ignite's Engine with its handlers, in the shape of its examples: accelerate divides the data."""

import torch
from accelerate import Accelerator
from ignite.engine import Engine, Events
from ignite.handlers import Checkpoint, DiskSaver, EMAHandler, global_step_from_engine
from ignite.metrics import Average, RunningAverage
from offline import Points, arguments, record
from torch import nn
from torch.utils.data import DataLoader

args = arguments(epochs=2)
accelerator = Accelerator()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
loader = DataLoader(Points(), batch_size=4, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)


def update(engine, batch):
    x, y = batch
    model.train()
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    accelerator.backward(loss)
    optimizer.step()
    return loss.item()


trainer = Engine(update)
Average().attach(trainer, "loss")
RunningAverage(output_transform=float).attach(trainer, "running")
average = EMAHandler(accelerator.unwrap_model(model), momentum=0.1)
average.attach(trainer)
epochs = []


@trainer.on(Events.EPOCH_COMPLETED)
def log(engine):
    epochs.append([engine.state.epoch, engine.state.iteration, engine.state.metrics["loss"]])


saver = DiskSaver(str(args.output_dir / "checkpoints"), create_dir=True, require_empty=False)
saved = {"model": accelerator.unwrap_model(model), "optimizer": optimizer, "trainer": trainer}
checkpoint = Checkpoint(saved, saver, n_saved=2, global_step_transform=global_step_from_engine(trainer))
trainer.add_event_handler(Events.EPOCH_COMPLETED, checkpoint)
trainer.run(loader, max_epochs=args.epochs)
if accelerator.is_main_process:
    averaged = torch.cat([each.flatten() for each in average.ema_model.parameters()]).norm()
    record(
        args,
        completed_steps=trainer.state.iteration,
        epochs=[each[:2] for each in epochs],
        losses=[each[2] for each in epochs],
        averaged=float(averaged),
    )
