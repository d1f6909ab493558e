"""Values that are set in a job file from outside."""

import pytest

from azureml_elastic.errors import SubmitError
from azureml_elastic.submit.yaml.job_file import apply_overrides, parse_override

DOCUMENT = {
    "command": "python train.py",
    "inputs": {"lr": 0.1, "data": {"type": "uri_folder", "path": "a"}},
    "elastic": {"max_instance_count": 4, "pools": [{"compute": "a"}, {"compute": "b"}]},
    "resources": None,
}


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("elastic.max_instance_count=12", ("elastic", "max_instance_count"), 12),
        ("inputs.lr=0.5", ("inputs", "lr"), 0.5),
        ("inputs.lr=1e-3", ("inputs", "lr"), "1e-3"),  # as YAML 1.1 has it: a number has a dot
        ("inputs.on=true", ("inputs", "on"), True),
        ("inputs.on='true'", ("inputs", "on"), "true"),
        ("environment_variables.A=1", ("environment_variables", "A"), 1),
        ("environment_variables.A=", ("environment_variables", "A"), ""),
        ("environment_variables.A=a=b", ("environment_variables", "A"), "a=b"),
        ("compute=null", ("compute",), None),
        ("inputs.data={type: uri_file, path: ./x}", ("inputs", "data"), {"type": "uri_file", "path": "./x"}),
        ("resources.locations=[a, b]", ("resources", "locations"), ["a", "b"]),
        ('tags."a.b=c".d=1', ("tags", "a.b=c", "d"), 1),
        ("elastic.pools.1.compute=c", ("elastic", "pools", "1", "compute"), "c"),
    ],
)
def test_an_override_is_read(override, path, value):
    assert parse_override(override) == (path, value)


def test_values_are_set_and_blocks_made():
    changed = apply_overrides(
        DOCUMENT,
        [
            "elastic.max_instance_count=12",
            "elastic.max_instance_count=13",
            "elastic.pools.1.compute=c",
            "elastic.rendezvous.table=other",
            "inputs.data.path=b",
            "resources.shm_size=8g",
            "new=1",
        ],
    )
    assert changed == {
        "command": "python train.py",
        "inputs": {"lr": 0.1, "data": {"type": "uri_folder", "path": "b"}},
        "elastic": {
            "max_instance_count": 13,
            "pools": [{"compute": "a"}, {"compute": "c"}],
            "rendezvous": {"table": "other"},
        },
        "resources": {"shm_size": "8g"},
        "new": 1,
    }


def test_the_given_document_stays_as_it_is():
    before = repr(DOCUMENT)
    apply_overrides(DOCUMENT, ["elastic.pools.0.compute=z", "inputs.lr=3"])
    assert repr(DOCUMENT) == before


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("elastic.max_instance_count", ["'elastic.max_instance_count' sets nothing", "inputs.lr=0.5"]),
        ("=3", ["'' sets nothing"]),
        ("a..b=3", ["'a..b' sets nothing"]),
        (".a=3", ["'.a' sets nothing"]),
        ("a.=3", ["'a.' sets nothing"]),
        ("inputs.lr.x=3", ["inputs.lr is a float", "no 'x'"]),
        ("command.x.y=3", ["command is a str", "no 'x'"]),
        ("elastic.pools.2.compute=a", ["elastic.pools is a list of 2", "0 to 1"]),
        ("elastic.pools.spot.compute=a", ["elastic.pools is a list of 2", "0 to 1"]),
        ("elastic.pools.-1=a", ["elastic.pools is a list of 2"]),
    ],
)
def test_an_override_that_sets_nothing_is_refused(override, parts):
    with pytest.raises(SubmitError) as caught:
        apply_overrides(DOCUMENT, [override])
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("override", ["environment_variables.KEY={hunter2", "environment_variables.KEY hunter2"])
def test_no_value_is_shown(override):
    with pytest.raises(SubmitError) as caught:
        apply_overrides(DOCUMENT, [override.replace(" ", "='")])
    assert "environment_variables.KEY" in str(caught.value)
    assert "hunter2" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__
