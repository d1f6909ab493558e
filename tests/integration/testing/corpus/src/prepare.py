"""Prepares a node: it has no rank."""

import os
import sys
from pathlib import Path

assert "RANK" not in os.environ
Path("prepared.txt").write_text("yes\n")
sys.stdout.write("prepared once\n")
