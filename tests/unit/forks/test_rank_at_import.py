"""Modules that read the rank while they are imported."""

from __future__ import annotations

import os
import sys
from types import ModuleType

import pytest

from azureml_elastic.forks.import_loader import set_rank, watched

HOLDER = "lightning_utilities.core.rank_zero"
READER = "lightning.fabric.utilities.rank_zero"


@pytest.fixture
def module(monkeypatch):
    def imported(name, source):
        found = ModuleType(name)
        monkeypatch.setitem(sys.modules, name, found)
        exec(source, found.__dict__)
        return found

    return imported


@pytest.mark.parametrize(("name", "noticed"), [(READER, []), ("somewhere.else", ["RANK", "LOCAL_RANK"])])
def test_only_known_modules_may_read_the_rank(module, name, noticed):
    with watched(os.environ) as read:
        module(name, "import os\nos.environ.get('RANK')\nos.getenv('LOCAL_RANK', 0)")
    assert read == noticed


def test_a_worker_sets_its_own_rank(module):
    holder = module(HOLDER, "def rank_zero_only(): ...")
    set_rank({"RANK": "3"})
    assert not hasattr(holder.rank_zero_only, "rank"), "set at the first import only"
    holder.rank_zero_only.rank = 0
    set_rank({})
    assert holder.rank_zero_only.rank == 0
    set_rank({"RANK": "3"})
    assert holder.rank_zero_only.rank == 3


def test_lightning_keeps_its_rank_there():
    """Names of private attributes, which a release may change."""
    pytest.importorskip("lightning")
    import lightning.fabric.utilities.rank_zero as reader

    assert reader.rank_zero_only is sys.modules[HOLDER].rank_zero_only
    assert isinstance(reader.rank_zero_only.rank, int)
