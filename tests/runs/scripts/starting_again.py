"""A script without a session that fails once and is started again: ``starting_again.py FACTS [--tensorboard FOLDER]``.

It appends to FACTS what it finds at each start, logs parameters to MLflow, and values to TensorBoard.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import mlflow

parser = argparse.ArgumentParser()
parser.add_argument("facts", type=Path)
parser.add_argument("--tensorboard")
arguments = parser.parse_args()
starts = len(arguments.facts.read_text().splitlines()) if arguments.facts.exists() else 0
facts = {
    "pid": os.getpid(),
    "arguments": sys.argv,
    "folder": str(Path.cwd()),
    "run": os.environ["TORCHELASTIC_RUN_ID"],
    "restarts": os.environ["TORCHELASTIC_RESTART_COUNT"],
    "own variable": os.environ.get("SET_BY_THE_SCRIPT"),
}
os.environ["SET_BY_THE_SCRIPT"] = "yes"
with arguments.facts.open("a") as file:
    file.write(json.dumps(facts) + "\n")

with mlflow.start_run() as run:
    mlflow.log_params({"lr": 0.1, "restarts": facts["restarts"], "long": "x" * 300})
    mlflow.log_param("pid", facts["pid"])
    mlflow.log_param("pid", facts["pid"], synchronous=False).wait()
    mlflow.set_tag("run", run.info.run_id)

if arguments.tensorboard:
    from torch.utils.tensorboard import SummaryWriter

    first = 3 if starts else 0
    folder = Path(arguments.tensorboard) / os.environ["TORCHELASTIC_RUN_ID"]
    with SummaryWriter(str(folder), purge_step=first) as writer:
        for step in range(first, 6):
            writer.add_scalar("loss", starts, step)

sys.exit(0 if starts else 3)
