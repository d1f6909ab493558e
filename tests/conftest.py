"""What tests of several packages need."""

import os

import pytest
from hypothesis import settings

from azureml_elastic.local.azurite import Azurite

# Explore at home, repeat in CI: a failure there must be the change's own.
settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("home", deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "home")


@pytest.fixture(scope="session")
def azurite():
    """The table service's real emulator on a free port."""
    with Azurite() as emulator:
        yield emulator
