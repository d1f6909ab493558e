"""Where the project's samples and the programs of the tests are."""

from __future__ import annotations

from pathlib import Path

SUPPORT = Path(__file__).resolve().parent
ROOT = SUPPORT.parents[1]
SAMPLES = ROOT / "samples"
PROGRAMS = ROOT / "tests" / "runs" / "scripts"
