"""Compares what ``prepare()`` gives a script with accelerate's own objects.

Training data count as in a run with three ranks, and an evaluation's are divided among the two that there are.
"""

import argparse
import json
from datetime import timedelta
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import InitProcessGroupKwargs
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

RANKS = 3

parser = argparse.ArgumentParser()
parser.add_argument("--folder", type=Path)
args = parser.parse_args()


class Numbered(TensorDataset):
    """Points that receive the number of each epoch."""

    def set_epoch(self, epoch):
        epochs.append(epoch)


def plain(value):
    return value if value is None or isinstance(value, (bool, int, float, str, torch.device)) else type(value).__name__


def differences(found, loader, ranks):
    """Return the names that one has and the other has not, and those whose values differ."""
    options = {"put_on_device": True, "rng_types": ["generator"]}
    own = prepare_data_loader(loader, accelerator.device, ranks, accelerator.process_index, **options)
    names = [name for name in dir(own) if hasattr(own, name) and not name.startswith("__")]
    missing = [name for name in names if not hasattr(found, name)]
    values = {name: [plain(getattr(each, name)) for each in (found, own)] for name in names if name not in missing}
    known = isinstance(found, DataLoader) and set(dir(own)) <= set(dir(found))
    same = [read(found) == read(own) for read in READS]
    others = {name: pair for name, pair in values.items() if pair[0] != pair[1] and name != "remainder"}
    return {"missing": missing, "values": others, "known": known, "same": same}


epochs = []
accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(hours=2))])
points = torch.arange(64.0).reshape(16, 4)
data = Numbered(points)
shuffled, in_order = DataLoader(data, batch_size=2, shuffle=True), DataLoader(data, batch_size=2)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
before = torch.random.get_rng_state()
model, optimizer, prepared, evaluation = accelerator.prepare(model, optimizer, shuffled, in_order)
READS = [
    lambda loader: (loader.total_batch_size, loader.total_dataset_length, len(loader), len(loader.batch_sampler)),
    lambda loader: (loader.dataset is data, loader.collate_fn, type(loader.batch_sampler)),
    lambda loader: (type(loader.sampler), type(loader.get_sampler()), sum(map(len, loader.batch_sampler))),
]
drawn = bool((torch.random.get_rng_state() != before).any())
record = {"drawn": drawn, "train": differences(prepared, DataLoader(data, batch_size=2, shuffle=True), RANKS)}
record["evaluation"] = differences(evaluation, DataLoader(data, batch_size=2), 2)
epochs.clear()
positions = []
for _ in range(2):
    for batch in prepared:
        accelerator.backward(model(batch[0]).sum())
        optimizer.step()
        optimizer.zero_grad()
        positions.append([prepared.iteration, prepared.end_of_dataloader, prepared.remainder])
group = torch.distributed.group.WORLD._get_backend(torch.device("cpu"))
record.update(positions=positions, epochs=epochs, timeout=group.options._timeout.total_seconds())
if accelerator.is_main_process:
    (args.folder / "record.json").write_text(json.dumps(record))
accelerator.end_training()
