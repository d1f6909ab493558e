"""Train a classifier of handwritten digits with Ray Train on a cluster that grows and shrinks.

``azureml-elastic local --framework ray --nodes 1:3 samples/ray_train.py``, or a job with
``ElasticDistribution(framework="ray")``. Alone, ``python samples/ray_train.py`` starts Ray on this machine.

Ray Train starts its workers again when nodes come or go, from the last checkpoint. The program runs on the first node.
If that node is lost it is started again on another one, and finds the checkpoints of the run under its storage path,
which must be on storage that all nodes share.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import ray
import ray.train.torch
import torch
from ray.train import Checkpoint, CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def train(config: dict[str, int]) -> None:
    """Train in one worker, from the last checkpoint if there is one."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    held_out = torch.arange(len(x)) % 5 == 0
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    begin = 0
    if (checkpoint := ray.train.get_checkpoint()) is not None:
        with checkpoint.as_directory() as folder:
            state = torch.load(Path(folder) / "state.pt")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        begin = state["epoch"] + 1
    workers = ray.train.get_context().get_world_size()
    parallel = ray.train.torch.prepare_model(model)
    training = TensorDataset(x[~held_out], y[~held_out])
    loader = ray.train.torch.prepare_data_loader(DataLoader(training, config["batch"] // workers, shuffle=True))
    for epoch in range(begin, config["epochs"]):
        if workers > 1:
            loader.sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(parallel(images), labels).backward()
            optimizer.step()
        with torch.no_grad():
            accuracy = (model(x[held_out]).argmax(1) == y[held_out]).float().mean().item()
        metrics = {"epoch": epoch, "accuracy": accuracy, "workers": workers}
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if ray.train.get_context().get_world_rank() == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
                torch.save(state, Path(folder) / "state.pt")
                checkpoint = Checkpoint.from_directory(folder)
                print(f"epoch {epoch}: accuracy {accuracy:.4f} with {workers} workers", flush=True)
            ray.train.report(metrics, checkpoint=checkpoint)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch", type=int, default=64, help="images of one step over all workers")
    parser.add_argument("--most-workers", type=int, default=8)
    parser.add_argument("--output", type=Path, default=Path("ray-results"), help="folder that all nodes share")
    arguments = parser.parse_args()
    ray.init()
    trainer = ray.train.torch.TorchTrainer(
        train,
        train_loop_config={"epochs": arguments.epochs, "batch": arguments.batch},
        scaling_config=ScalingConfig(num_workers=(1, arguments.most_workers), elastic_resize_monitor_interval_s=10),
        run_config=RunConfig(
            name="digits",  # a run of the same name goes on from its checkpoints
            storage_path=str(arguments.output.resolve()),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
            failure_config=FailureConfig(max_failures=-1),
        ),
    )
    result = trainer.fit()
    assert result.metrics is not None
    print(f"accuracy {result.metrics['accuracy']:.4f} after epoch {result.metrics['epoch']}", flush=True)


if __name__ == "__main__":
    main()
