"""Train through ONNX Runtime where it is installed, elastically; elsewhere PyTorch alone trains the same model.

Locally:  azureml-elastic local --nodes 1:3 samples/onnx_runtime.py

ONNX Runtime takes over the forward and the backward pass of a model that is wrapped in its ``ORTModule`` (``pip install
torch-ort onnxruntime-training``). ``run.wrap`` goes around it, so that gradients are averaged, and ``run.track`` saves
it. Its releases support certain versions of torch; where it cannot be imported, the sample prints the reason.
The data are random vectors; a small network learns where the largest element is.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn
from torch.utils.data import TensorDataset

from azureml_elastic import train

GLOBAL_BATCH = 60


def accelerated(model: nn.Module) -> tuple[nn.Module, str]:
    """Return the model, wrapped for ONNX Runtime if possible, and the name of the engine that trains it."""
    try:
        from torch_ort import ORTModule
    except (ImportError, RuntimeError) as error:  # RuntimeError: this version of torch is not supported
        return model, f"PyTorch, for ONNX Runtime cannot be used ({error})"
    return ORTModule(model), "ONNX Runtime"


def main() -> None:
    """Train, and print the share of correct predictions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--step-delay", type=float, default=0.0, help="seconds to wait in each step, to watch it")
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    x = torch.rand(1200, 8)
    dataset = TensorDataset(x, x.argmax(1))

    run = train.start()
    model, trained_by = accelerated(nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8)))
    model = run.wrap(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    loader = run.loader(dataset, global_batch_size=GLOBAL_BATCH)
    if run.is_main:
        print(f"round {run.round}: {run.world_size} ranks, continuing after step {run.steps}", flush=True)
        print(f"trained by {trained_by}", flush=True)

    for epoch in run.epochs(arguments.epochs):
        for x, y in loader:
            scores = model(x)
            run.backward(nn.functional.cross_entropy(scores, y))
            optimizer.step()
            optimizer.zero_grad()
            right = (scores.argmax(1) == y).float().mean().item()
            time.sleep(arguments.step_delay)
            run.commit()
            if run.is_main and run.steps % 10 == 0:
                print(f"epoch {epoch} step {run.steps}: {right:.2f} right", flush=True)


if __name__ == "__main__":
    main()
