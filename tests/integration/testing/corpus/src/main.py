"""Prints its rank and its arguments, and leaves a file in each folder for outputs that an argument names."""

import os
import sys
from pathlib import Path

words = [word.partition("=")[2] or word for word in sys.argv[1:]]
shown = [os.environ["LAUNCHED_BY"].strip()] if "LAUNCHED_BY" in os.environ else []
for word in words:
    path = Path(word)
    if not path.is_absolute():
        shown.append(word)
    elif path.is_file():
        shown.append(f"file of {path.read_text().strip()}")
    elif list(path.iterdir()):
        shown.append(f"folder of {', '.join(sorted(each.name for each in path.iterdir()))}")
    else:
        Path(path, f"rank-{os.environ['RANK']}.txt").write_text("written\n")
        shown.append("empty folder")
sys.stdout.write(f"[{os.environ['RANK']} of {os.environ['WORLD_SIZE']}] {' '.join(shown)}\n")
