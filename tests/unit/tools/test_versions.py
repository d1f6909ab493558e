"""The versions that the package declares are those that are tested."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_oldest_sdk_that_is_allowed_is_tested():
    declared = re.search(r'"azure-ai-ml>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    tested = re.search(r'OLDEST_SDK = "([\d.]+)"', (ROOT / "noxfile.py").read_text())
    assert declared[1] == tested[1]
    assert f"azure-ai-ml {declared[1]} or newer" in (ROOT / "docs" / "how-to" / "submit.md").read_text()
