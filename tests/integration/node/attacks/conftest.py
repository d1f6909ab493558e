"""A run of two nodes for each test."""

from __future__ import annotations

import pytest

from tests.support.rendezvous.sealed_run import Run


@pytest.fixture
def run(tmp_path):
    made = Run(tmp_path / "table.sqlite")
    yield made
    made.close()
