"""Expressions in commands, and the bindings of steps."""

import pytest

from azureml_elastic.errors import UsageError
from azureml_elastic.testing.jobs.expressions import expand, parent_reference

INPUTS = {"data": "/mnt/data", "lr": "0.1"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("python train.py --lr ${{inputs.lr}}", "python train.py --lr 0.1"),
        ("${{ inputs.data }}/a ${{outputs.model}}", "/mnt/data/a /mnt/model"),
        ("echo $HOME ${X} $$", "echo $HOME ${X} $$"),
        ("train $[[--lr ${{inputs.lr}}]] end", "train --lr 0.1 end"),
        ("train $[[--seed ${{inputs.seed}}]] end", "train  end"),
        ("$[[a ${{inputs.lr}} ${{inputs.seed}}]]", ""),
    ],
)
def test_each_expression_becomes_its_value(text, expected):
    assert expand(text, INPUTS, {"model": "/mnt/model"}) == expected


def test_a_value_that_looks_like_an_expression_is_not_expanded_again():
    assert expand("${{inputs.a}}", {"a": "${{inputs.b}}"}, {}) == "${{inputs.b}}"


@pytest.mark.parametrize("text", ["${{inputs.seed}}", "${{outputs.data}}", "${{search_space.lr}}", "${{inputs}}"])
def test_an_expression_without_a_value_is_refused(text):
    with pytest.raises(UsageError, match="expression"):
        expand(text, INPUTS, {})


def test_a_step_is_bound_to_its_pipeline():
    assert parent_reference("${{parent.inputs.data}}") == ("inputs", "data")
    assert parent_reference("${{ parent.outputs.model }}") == ("outputs", "model")
    assert parent_reference("0.1") is None
    assert parent_reference(None) is None


@pytest.mark.parametrize("text", ["${{parent.jobs.first.outputs.model}}", "a ${{parent.inputs.data}}"])
def test_a_step_bound_to_another_step_is_refused(text):
    with pytest.raises(UsageError, match="run in parallel"):
        parent_reference(text)
