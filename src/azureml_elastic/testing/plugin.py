"""pytest plugin with the fixture ``local_workspace`` and the mark of the same name for its arguments.

pytest imports this module at every start, so only the fixture itself imports more than pytest.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from azureml_elastic.testing.workspace import LocalWorkspace


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark."""
    config.addinivalue_line(
        "markers", "local_workspace(**arguments): the arguments of LocalWorkspace for the fixture local_workspace"
    )


@pytest.fixture
def local_workspace(request: pytest.FixtureRequest) -> Iterator[LocalWorkspace]:
    """Yield a :class:`LocalWorkspace`, created with the arguments of the mark ``local_workspace``."""
    from azureml_elastic.testing.workspace import LocalWorkspace

    mark = request.node.get_closest_marker("local_workspace")
    with LocalWorkspace(**({} if mark is None else mark.kwargs)) as workspace:
        yield workspace
