"""What is shown is type-checked: all samples, and all pages that have Python; the checkers run in ``nox -s types``."""

import pytest

from tools.typed_examples import ROOT, UNKNOWN, with_unknowns, write_modules


def test_all_samples_are_checked_under_names_by_which_they_import_each_other(tmp_path):
    texts = {path.name: path.read_text() for path in write_modules(tmp_path)}
    samples = [path.read_text() for path in (ROOT / "samples").glob("**/*.py")]
    assert len(samples) > 20
    assert all(any(text.startswith(sample) for text in texts.values()) for sample in samples)
    assert {"network.py", "problem.py", "reports.py", "sweep_src_train.py", "readme.py"} <= texts.keys()


@pytest.mark.parametrize(
    ("text", "own"),
    [
        ("import torch", True),
        ("import horovod.torch as hvd", False),
        ("def load():\n    from sklearn.datasets import load_digits", False),
        ("from azure.ai.ml import Input", False),
        ("from example_names import ml_client, run", False),
        ("from example_names import run", True),
    ],
)
def test_values_of_unknown_types_are_errors_but_where_another_package_has_none(text, own):
    assert (UNKNOWN in with_unknowns(text)) is not own
