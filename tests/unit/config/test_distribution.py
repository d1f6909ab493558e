"""Whether processes stay over rounds."""

from __future__ import annotations

import pytest

from azureml_elastic.config import ElasticDistribution


@pytest.mark.parametrize(
    ("settings", "opens_session", "stay"),
    [
        ({"recovery": "in_process"}, True, True),
        ({"recovery": "in_process"}, False, False),  # such as a training stack's own script
        ({"recovery": "restart"}, True, False),
        ({"recovery": "restart"}, False, False),
        ({"framework": "dask"}, False, True),
    ],
)
def test_processes_stay_where_a_session_recovers_in_them_or_an_engine_does(settings, opens_session, stay):
    assert ElasticDistribution(**settings).keeps_processes(opens_session=opens_session) == stay
