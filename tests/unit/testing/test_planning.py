"""Plans of submitted jobs: their runs, where their data is, and what waits for what."""

import pytest

from azureml_elastic.errors import UsageError
from azureml_elastic.testing.jobs.body import CommandBody, InputBody, OutputBody, PipelineBody, Reference
from azureml_elastic.testing.jobs.machines import Pool
from azureml_elastic.testing.jobs.planning import Planner
from azureml_elastic.testing.jobs.runs import Run

PLACE = "azureml://datastores/workspaceblobstore/paths/"
PLANNER = Planner({"cluster": Pool(nodes=2)}, lambda _: None)


def step(reads=(), outputs=None, **fields):
    inputs = {name: InputBody(reference=Reference(path, output)) for name, path, output in reads}
    written = {"out": OutputBody()} if outputs is None else outputs
    return CommandBody("true", None, inputs, written, {}, "cluster", **fields)


def plan(steps, outputs=None):
    body = PipelineBody(steps, outputs=outputs or {})
    return PLANNER.plan(Run("root", "Pipeline", "root", "exp", {"settings": {"continue_on_step_failure": True}}), body)


def test_a_step_reads_where_an_earlier_or_later_defined_one_writes():
    last, first = step([("data", ("first",), "out")]), step()
    made = plan({"last": last, "first": first})
    runs = {run.path: run for run in made.runs}
    last_run, first_run = runs["last",], runs["first",]
    assert last_run.reads == {first_run.name}
    assert made.jobs[last_run.name].body.inputs["data"].uri == first_run.outputs["out"][1]
    assert made.jobs[last_run.name].inputs["data"].path == f"azureml/{first_run.name}/out"
    assert (first_run.parent, first_run.root, first_run.display_name) == ("root", "root", "first")


def test_an_output_of_the_pipeline_is_that_of_the_step_which_is_bound_to_it():
    inner = PipelineBody(
        {"t": step(outputs={"m": OutputBody(type="uri_file", reference=Reference(("sub",), "model"))})},
        outputs={"model": OutputBody(type="uri_file", reference=Reference((), "best"))},
    )
    steps = {"sub": inner, "after": step([("model", ("sub",), "model")])}
    made = plan(steps, {"best": OutputBody(type="uri_file")})
    runs = {run.path: run for run in made.runs}
    assert runs[()].outputs["best"] == ("uri_file", f"{PLACE}azureml/root/best")
    assert runs["sub", "t"].outputs["m"] == runs["sub",].outputs["model"] == runs[()].outputs["best"]
    # Both must complete: the step that writes it, and the pipeline around that step.
    assert runs["after",].reads == {runs["sub",].name, runs["sub", "t"].name}
    assert runs["sub", "t"].parent == runs["sub",].name
    assert runs["sub",].continues_on_failure


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ({"a": step([("x", ("b",), "out")])}, "'x' of the step 'a' is bound to the step 'b'.*It has: a"),
        ({"a": step(), "b": step([("x", ("a",), "model")])}, "output 'model' of 'a', which has: out"),
        (
            {"a": step([("x", ("b",), "out")]), "b": step([("x", ("a",), "out")])},
            "wait for each other: (a reads b reads a|b reads a reads b)",
        ),
        (
            {"p": PipelineBody({"a": step([("x", ("p",), "out")])}, outputs={"out": OutputBody()})},
            "wait for each other",
        ),
        ({"a": step(nodes=3)}, "above the limit of 2"),
        ({"a": step(outputs={"out": OutputBody(uri="https://example.com/x")})}, "not in the local workspace"),
    ],
)
def test_steps_that_do_not_fit_together_are_refused(steps, words):
    with pytest.raises(UsageError, match=words):
        plan(steps)
