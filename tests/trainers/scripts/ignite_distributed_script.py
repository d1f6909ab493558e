"""Trains by ignite's own distribution, as its examples do: without a session, from its own checkpoint."""

import ignite.distributed as idist
import torch
from ignite.engine import Engine, Events
from ignite.handlers import Checkpoint, DiskSaver
from offline import Points, arguments, record
from torch import nn

args = arguments(epochs=4)


def training(local_rank):
    torch.manual_seed(0)
    loader = idist.auto_dataloader(Points(), batch_size=8, shuffle=True)
    model = idist.auto_model(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)))
    optimizer = idist.auto_optim(torch.optim.AdamW(model.parameters(), lr=3e-3))

    def update(engine, batch):
        x, y = batch
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    trainer = Engine(update)
    saved = {"model": model, "optimizer": optimizer, "trainer": trainer}
    folder = args.output_dir / "checkpoints"
    if folder.exists() and (files := sorted(folder.glob("*.pt"), key=lambda file: file.stat().st_mtime)):
        Checkpoint.load_objects(saved, torch.load(files[-1], weights_only=True))

    @trainer.on(Events.EPOCH_STARTED)
    def shuffle(engine):
        loader.sampler.set_epoch(engine.state.epoch)

    saver = DiskSaver(str(folder), create_dir=True, require_empty=False)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, Checkpoint(saved, saver, n_saved=2))
    trainer.run(loader, max_epochs=args.epochs)
    if idist.get_rank() == 0:
        record(args, epochs=trainer.state.epoch)


with idist.Parallel(backend="gloo") as parallel:
    parallel.run(training)
