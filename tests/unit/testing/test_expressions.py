"""Expressions in commands, and the bindings of steps."""

import pytest

from azureml_elastic.errors import UsageError
from azureml_elastic.testing.jobs.search_space import expand, read_binding, with_values

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


def test_a_step_is_bound_to_its_pipeline_or_to_another_step():
    own = {"step": None}
    assert read_binding("${{parent.inputs.data}}").groupdict() == {"kind": "inputs", "name": "data", **own}
    assert read_binding("${{ parent.outputs.model }}").groupdict() == {"kind": "outputs", "name": "model", **own}
    of_a_step = {"kind": "outputs", "name": "model", "step": "first"}
    assert read_binding("${{parent.jobs.first.outputs.model}}").groupdict() == of_a_step
    assert read_binding("0.1") is None
    assert read_binding(None) is None


@pytest.mark.parametrize("text", ["${{parent.jobs.first.inputs.data}}", "a ${{parent.inputs.data}}", "${{inputs.a}}"])
def test_another_binding_is_refused(text):
    with pytest.raises(UsageError, match="does not support the binding"):
        read_binding(text)


def test_a_trial_has_the_values_of_its_search_space_and_keeps_other_expressions():
    text = "train --lr ${{search_space.lr}} $[[--x ${{inputs.x}}]]"
    assert with_values(text, {"lr": "0.1"}) == "train --lr 0.1 $[[--x ${{inputs.x}}]]"
    with pytest.raises(UsageError, match="the search space has: seed"):
        with_values(text, {"seed": "1"})
