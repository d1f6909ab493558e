"""What tests of several packages need."""

import pytest

from azureml_elastic.local.azurite import Azurite


@pytest.fixture(scope="session")
def azurite():
    """The table service's real emulator on a free port."""
    with Azurite() as emulator:
        yield emulator
