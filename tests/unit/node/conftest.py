"""The table of a run in a file, for all tests of this folder."""

from __future__ import annotations

import pytest

from azureml_elastic.config import TableRendezvous
from azureml_elastic.environment.node import NodeEnvironment
from azureml_elastic.node.table import open_table


@pytest.fixture
def table(tmp_path):
    opened = open_table(TableRendezvous(endpoint=str(tmp_path / "table.sqlite")), "run", NodeEnvironment.read({}))
    yield opened
    opened.close()
