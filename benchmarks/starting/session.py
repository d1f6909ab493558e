"""The training script under this library: a session."""

from __future__ import annotations

import torch
from network import GLOBAL_BATCH_SIZE, dataset, network, prepare, recorder
from torch import nn

from azureml_elastic import train


def main() -> None:
    prepare()
    record = recorder()
    run = train.start()
    model = run.wrap(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    run.track(model=model, optimizer=optimizer)
    loader = run.loader(dataset(), global_batch_size=GLOBAL_BATCH_SIZE)
    loss_of = nn.CrossEntropyLoss()
    for _ in run.epochs(1_000_000):
        for x, y in loader:
            run.backward(loss_of(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            before = run.steps
            run.commit()
            if run.steps > before:
                record(run.world_size, run.rank, run.round, run.steps)


if __name__ == "__main__":
    main()
