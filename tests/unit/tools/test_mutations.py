"""Each mutation breaks one place that is there, and names tests that are."""

from __future__ import annotations

import runpy

from tests.support.paths import ROOT


def test_the_text_of_each_mutation_occurs_once_and_its_tests_exist():
    for mutation in runpy.run_path(str(ROOT / "tools" / "mutations.py"))["MUTATIONS"]:
        text = (ROOT / "src" / "azureml_elastic" / mutation.file).read_text()
        assert text.count(mutation.old) == 1, mutation.name
        for test in mutation.tests:
            assert (ROOT / "tests" / test.partition("::")[0]).exists(), mutation.name
