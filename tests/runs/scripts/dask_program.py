"""A program with Dask: records each execution of a task, and waits for faults that the test injects.

``dask_program.py FOLDER lost`` blocks until its node is killed; started again, it waits for three workers and finishes.
``dask_program.py FOLDER replaced`` finishes when another worker has taken the place of one of its two.
``dask_program.py FOLDER evicted`` reads its results when one of its three workers has left, then blocks until its node
is killed; started again, it finishes with one worker.
``dask_program.py FOLDER undisturbed`` finishes with two workers.
"""

import sys
import time
from pathlib import Path

from distributed import Client, wait

TASKS = 24
WORKERS = {("lost", 1): 3, ("lost", 2): 3, ("evicted", 1): 3, ("evicted", 2): 1}
"""Number of workers to wait for by mode and start, where it is not two."""


def square(number, folder):
    with (Path(folder) / f"executed-{number}").open("a") as file:
        file.write("x")
    return number * number


def workers_of(client):
    return set(client.scheduler_info(n_workers=-1)["workers"])


def main(folder, mode):
    starts = folder / "starts"
    with starts.open("a") as file:
        file.write("x")
    start = len(starts.read_text())
    with Client() as client:
        client.wait_for_workers(WORKERS.get((mode, start), 2), timeout=120)
        futures = [client.submit(square, number, str(folder), pure=False) for number in range(TASKS)]
        wait(futures)
        before = workers_of(client)
        (folder / "computed").touch()
        while mode == "replaced" and (before <= (now := workers_of(client)) or len(now) < len(before)):
            time.sleep(0.1)
        if mode == "evicted" and start == 1:
            while before <= workers_of(client):
                time.sleep(0.1)
            (folder / "result-after-notice").write_text(str(sum(client.gather(futures))))
        while mode in ("lost", "evicted") and start == 1:
            time.sleep(0.1)
        (folder / "result").write_text(str(sum(client.gather(futures))))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
