"""Nodes of one run, for all tests of this folder."""

from __future__ import annotations

import pytest

from tests.support.rendezvous.nodes import Nodes


@pytest.fixture
def nodes(tmp_path):
    made = Nodes(tmp_path / "table.sqlite")
    yield made
    made.close()
