"""A run of two nodes for each test."""

from __future__ import annotations

import pytest

from tests.support.rendezvous.sealed_run import Run


@pytest.fixture(autouse=True)
def no_traceback(caplog):
    """Whatever is received, no handler fails: what is malformed has been found to be so."""
    yield
    assert not [record.getMessage() for record in caplog.get_records("call") if record.exc_info]


@pytest.fixture
def run(tmp_path):
    made = Run(tmp_path / "table.sqlite")
    yield made
    made.close()
