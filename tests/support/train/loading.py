"""A training script with data workers, a helper process and two programs; started by ``test_signals.py``."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from azureml_elastic.sigterm_filter import filter_sigterm_in_children, ignore_signal, sigterm_blocked


class Slow:
    def __len__(self):
        return 4000

    def __getitem__(self, index):
        time.sleep(0.01)
        import torch

        return torch.tensor([float(index)])


def linger():
    time.sleep(1000)


def handle(path):
    """Wait in the system, as a server does, and write a file when it receives SIGTERM."""

    def on_term(*_):
        Path(path).write_text("expected")
        sys.exit(3)

    signal.signal(signal.SIGTERM, on_term)
    Path(path + ".ready").touch()
    multiprocessing.Event().wait(1000)


def run_a_program(path):
    """Start a program and end it by SIGTERM."""
    program = subprocess.Popen(["sleep", "1000"])
    program.terminate()
    Path(path).write_text(str(program.wait()))


def square(number):
    return number * number


def ends(context, folder):
    """Return how processes end that are terminated by their parents."""
    found = {}
    process = context.Process(target=linger)
    process.start()
    time.sleep(0.5)
    process.terminate()
    process.join(20)
    found["terminated"] = process.exitcode
    path = str(folder / "handled")
    process = context.Process(target=handle, args=(path,))
    process.start()
    while not Path(path + ".ready").exists():
        time.sleep(0.01)
    time.sleep(0.2)
    process.terminate()
    process.join(20)
    found["handled"] = [process.exitcode, Path(path).read_text()]
    path = str(folder / "programmed")
    process = context.Process(target=run_a_program, args=(path,))
    process.start()
    process.join(20)
    found["program"] = [process.exitcode, Path(path).read_text()]
    with context.Pool(2) as pool:
        found["pool"] = pool.map(square, [1, 2, 3])
    program = subprocess.Popen(["sleep", "1000"])
    program.terminate()
    found["own program"] = program.wait(20)
    return found


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("method")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ends", action="store_true")
    arguments = parser.parse_args()
    folder = arguments.folder
    context = multiprocessing.get_context(arguments.method)
    if arguments.ends:
        signal.signal(signal.SIGTERM, ignore_signal)
        filter_sigterm_in_children()
        for index in range(3):
            attempt = folder / str(index)
            attempt.mkdir()
            print(json.dumps(ends(context, attempt)), flush=True)
        return
    # Not at the top: every spawned child would import it too.
    import torch
    from torch import nn

    from azureml_elastic import train
    from azureml_elastic.config import CheckpointPolicy

    torch.set_num_threads(1)
    with train.start(CheckpointPolicy(path=str(folder / "checkpoints"), every=None)) as run:
        helper = context.Process(target=linger)
        helper.start()
        with sigterm_blocked():
            needed = subprocess.Popen(["sleep", "1000"])
        other = subprocess.Popen(["sleep", "1000"])
        (folder / "pids.tmp").write_text(json.dumps([os.getpid(), helper.pid, needed.pid, other.pid]))
        (folder / "pids.tmp").rename(folder / "pids")
        model = run.wrap(nn.Linear(1, 1))
        run.track(model=model)
        # Data workers that are not forked import torch.
        number = 2 if arguments.method == "fork" else 1
        loader = run.loader(Slow(), global_batch_size=4, num_workers=number, multiprocessing_context=context)
        try:
            for _ in run.epochs(1):
                for x in loader:
                    run.backward(model(x).mean())
                    run.commit()
        finally:
            for process in (helper, needed, other):
                process.kill()


if __name__ == "__main__":
    main()
