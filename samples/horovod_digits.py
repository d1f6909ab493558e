"""Train a small network on images of handwritten digits with Horovod, on nodes that come and go.

``azureml-elastic local --framework horovod --nodes 1:3 samples/horovod_digits.py``, or a job with
``ElasticDistribution(framework="horovod")``. It is a program for Horovod's elastic mode but for one import: the
state is this library's, whose commits are saved as checkpoints.
"""

from __future__ import annotations

import argparse

import horovod.torch as hvd
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from azureml_elastic.train.horovod import TorchState


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=16, help="samples of each worker")
    arguments = parser.parse_args()
    hvd.init()
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    dataset = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
    train_set, test_set = torch.utils.data.random_split(dataset, (1500, 297))
    sampler = hvd.elastic.ElasticSampler(train_set)
    loader = DataLoader(train_set, arguments.batch_size, sampler=sampler)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * hvd.size(), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    state = TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0, batch=0)

    def scale_learning_rate() -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * hvd.size()

    state.register_reset_callbacks([scale_learning_rate])

    @hvd.elastic.run
    def train(state: TorchState) -> None:
        while state.epoch < arguments.epochs:
            for inputs, targets in loader:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(inputs), targets).backward()
                optimizer.step()
                sampler.record_batch(state.batch, arguments.batch_size)
                state.batch += 1
                if state.batch % 5 == 0:
                    state.commit()
            state.epoch += 1
            state.batch = 0
            sampler.set_epoch(state.epoch)
            inputs, targets = next(iter(DataLoader(test_set, len(test_set))))
            accuracy = float((model(inputs).argmax(1) == targets).float().mean())
            if hvd.rank() == 0:
                print(f"epoch {state.epoch} with {hvd.size()} workers: accuracy {accuracy:.3f}", flush=True)
            state.commit()

    train(state)


if __name__ == "__main__":
    main()
