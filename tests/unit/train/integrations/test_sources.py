"""What a stack's trainer trains is found in the loader that its loop would iterate over."""

from __future__ import annotations

import pytest
from torch.utils.data import DataLoader

from azureml_elastic.train.integrations.sources import obstacle, source_of

stateful = pytest.importorskip("torchdata.stateful_dataloader")


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it
@pytest.mark.parametrize("kind", [DataLoader, stateful.StatefulDataLoader])
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_stateful_loader_is_taken_like_any_other(kind, shuffle):
    loader = kind(list(range(10)), batch_size=4, shuffle=shuffle, drop_last=True)
    assert obstacle(loader) is None
    source = source_of(loader, ranks=2)
    assert (source.batch_size, source.shuffle, source.drop_last) == (4, shuffle, True)
    assert (source.sampler, source.whole_batches) == (None, False)
