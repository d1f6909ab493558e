"""A program that is started by ``-m``."""

import os
import sys

sys.stdout.write(f"[{os.environ['RANK']} of {os.environ['WORLD_SIZE']}] a module with {' '.join(sys.argv[1:])}\n")
