"""Write the accuracy of the trained model on the held-out images."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from network import build


def main() -> None:
    """Write report.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--report", type=Path, required=True)
    arguments = parser.parse_args()

    images = np.load(arguments.data / "held_out.npz")
    network = build()
    network.load_state_dict(torch.load(arguments.model / "model.pt"))
    network.eval()
    with torch.no_grad():
        digits = network(torch.from_numpy(images["x"])).argmax(1).numpy()
    accuracy = float((digits == images["y"]).mean())
    (arguments.report / "report.json").write_text(json.dumps({"accuracy": round(accuracy, 4)}), encoding="utf-8")
    print(f"accuracy {accuracy:.4f}")


if __name__ == "__main__":
    main()
