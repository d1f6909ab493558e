"""The check of the built distributions."""

from tools.check_package import MARKER, METADATA, SOURCES, source_problems, wheel_problems

INFO = [f"azureml_elastic-0.1.0.dist-info/{name}" for name in METADATA]
LIBRARY = [MARKER, "azureml_elastic/train/session.py"]


def test_a_wheel_with_the_files_of_the_source_is_accepted():
    assert wheel_problems([*LIBRARY, *INFO], set(LIBRARY)) == []


def test_a_wheel_without_its_marker_or_with_tests_and_caches_is_refused():
    cache = "azureml_elastic/train/__pycache__/session.cpython-311.pyc"
    assert wheel_problems(["tests/test_session.py", LIBRARY[1], cache, *INFO], set(LIBRARY)) == [
        f"The wheel has {cache}, which is not in src.",
        "The wheel has tests/test_session.py, which is not in src.",
        "The wheel lacks azureml_elastic/py.typed.",
    ]


def test_the_metadata_have_the_licence_and_the_commands():
    assert wheel_problems([*LIBRARY, *INFO[:-1]], set(LIBRARY)) == ["The wheel's metadata lack licenses/LICENSE."]


def test_a_source_distribution_can_be_built_and_tested_and_has_no_caches():
    names = [f"azureml_elastic-0.1.0/{name}" for name in SOURCES]
    assert source_problems(names) == []
    cached = [*names[1:], "azureml_elastic-0.1.0/.mypy_cache/index.json"]
    assert source_problems(cached) == [
        "The source distribution has .mypy_cache/index.json.",
        f"The source distribution lacks {SOURCES[0]}.",
    ]
