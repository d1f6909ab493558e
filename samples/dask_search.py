"""Search hyper-parameters of a classifier of handwritten digits on a Dask cluster that grows and shrinks.

``azureml-elastic local --framework dask --nodes 1:3 samples/dask_search.py``, or a job with
``ElasticDistribution(framework="dask")``. Alone, ``python samples/dask_search.py`` starts a cluster on this machine.

The program runs on the first node. If that node is lost it is started again on another one, so each finished candidate
is recorded in a file, and not evaluated again.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path

from distributed import Client, as_completed
from sklearn.datasets import load_digits
from sklearn.model_selection import cross_val_score
from sklearn.svm import SVC


def accuracy(candidate: dict[str, float]) -> float:
    """Return the mean accuracy of five folds."""
    images, labels = load_digits(return_X_y=True)
    return float(cross_val_score(SVC(**candidate), images / 16, labels, cv=5).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("search.jsonl"), help="finished candidates, one per line")
    arguments = parser.parse_args()
    candidates = [{"C": c, "gamma": gamma} for c, gamma in itertools.product((0.1, 1, 10, 100), (0.01, 0.03, 0.1, 0.3))]
    lines = arguments.output.read_text().splitlines() if arguments.output.exists() else []
    finished = {json.dumps(line["candidate"]): line["accuracy"] for line in map(json.loads, lines)}
    with Client() as client:
        missing = [each for each in candidates if json.dumps(each) not in finished]
        print(f"{len(finished)} candidates are finished, {len(missing)} are to be evaluated", flush=True)
        futures = {client.submit(accuracy, each, pure=False): each for each in missing}
        for future, result in as_completed(futures, with_results=True):
            with arguments.output.open("a") as file:
                file.write(json.dumps({"candidate": futures[future], "accuracy": result}) + "\n")
            finished[json.dumps(futures[future])] = result
    best = max(finished, key=lambda name: finished[name])
    print(f"best of {len(finished)}: {best} with an accuracy of {finished[best]:.4f}", flush=True)


if __name__ == "__main__":
    main()
