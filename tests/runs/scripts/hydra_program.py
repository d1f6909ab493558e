"""Notes the output folder that Hydra has made for it, and fails at its first start."""

import os
import sys
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig


@hydra.main(version_base=None, config_path=None)
def main(config):
    folder = HydraConfig.get().runtime.output_dir
    with Path(config.facts).open("a") as file:
        file.write(f"{folder}\n")
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        sys.exit(1)


main()
