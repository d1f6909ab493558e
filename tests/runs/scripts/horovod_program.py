"""A program with Horovod's elastic mode: records where training starts each time, and each commit.

``horovod_program.py FOLDER`` trains a linear model, with a commit every five batches, until the test has finished its
faults (the file ``enough``). The training of a batch takes a few milliseconds.
"""

import os
import sys
import time
from pathlib import Path

import horovod.torch as hvd
import torch

from azureml_elastic.train.horovod import TorchState


def record(folder, *words):
    with (folder / "trace").open("a") as file:
        file.write(" ".join(map(str, words)) + "\n")


def train_batch(state):
    generator = torch.Generator().manual_seed(1000 * state.batch + hvd.rank())
    inputs = torch.randn(8, 4, generator=generator)
    loss = torch.nn.functional.mse_loss(state.model(inputs), inputs.sum(1, keepdim=True))
    state.optimizer.zero_grad()
    loss.backward()
    state.optimizer.step()
    state.batch += 1


def main(folder):
    hvd.init()
    torch.manual_seed(os.getpid())  # so that new workers begin with other weights
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.001)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    state = TorchState(model=model, optimizer=optimizer, batch=0)

    @hvd.elastic.run
    def train(state):
        record(folder, "enter", state.batch, hvd.size(), os.getpid())
        enough = 0.0
        while not enough:
            train_batch(state)
            if state.batch % 5 == 0:
                if hvd.rank() == 0:
                    record(folder, "commit", state.batch)
                state.commit()
            time.sleep(0.005)
            mine = torch.tensor(float((folder / "enough").exists()))
            enough = hvd.allreduce(mine, name="enough", op=hvd.Max).item()

    train(state)
    weights = torch.cat([value.flatten() for value in state.model.state_dict().values()])
    gathered = hvd.allgather(weights[None], name="weights")
    assert torch.equal(gathered.max(0).values, gathered.min(0).values), "the ranks have different weights"
    if hvd.rank() == 0:
        error = (weights - torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0])).abs().max()
        (folder / "result").write_text(f"{error:.4f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
