"""Write scikit-learn's images of handwritten digits as arrays: a training set, and every fifth image held out."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits


def main() -> None:
    """Write train.npz and held_out.npz."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    digits = load_digits()
    x = digits.images.astype(np.float32)[:, np.newaxis] / 16  # (1797, 1, 8, 8)
    held_out = np.arange(len(x)) % 5 == 0
    np.savez(out / "train.npz", x=x[~held_out], y=digits.target[~held_out])
    np.savez(out / "held_out.npz", x=x[held_out], y=digits.target[held_out])
    print(f"{(~held_out).sum()} images to train, {held_out.sum()} to evaluate")


if __name__ == "__main__":
    main()
