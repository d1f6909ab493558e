"""Scripts in the shapes of public examples train under faults as they do without, by an observer outside of them.

Rank 0's node is killed, and another arrives. Or faults come at random, a few seeds with the other tests and a hundred
by ``python -m nox -s corpus``; ``CORPUS_SEEDS=17:18 python -m pytest tests/stacks/test_corpus.py`` replays one. What
is observed is in ``tests/support/observer.py``.
"""

from __future__ import annotations

import functools
import json
import os
import random
from collections import defaultdict
from pathlib import Path

import pytest

from tests.support.observed import assert_same, assert_same_steps, files, observed, run_observed

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

CORPUS = Path(__file__).with_name("corpus")
LIGHTNING = CORPUS.with_name("lightning_script.py")
FIRST, LAST = (int(number) for number in os.environ.get("CORPUS_SEEDS", "0:2").split(":"))

SHARED = {"averages", "clm --save_on_main --resume", "closures", "ema_evaluated", "gan", "one_cycle", "own_optimizer"}
"""Cases whose run without faults several tests use."""

ONE_PROCESS, ANOTHER = pytest.mark.xdist_group("corpus"), pytest.mark.xdist_group("other cases of the corpus")
"""For tests that share those, and the server that has imported the stacks."""

CASES = [
    "averages",
    "checkpointing",
    "clm --save_on_main --resume",
    "clm --resume",
    "closures",
    "cross_validation",
    "detection",
    "early_stopping",
    "ema",
    "gan",
    "glue",
    "lightning_callbacks",
    "lightning_cli",
    "looks_first",
    "metric_learning",
    "ner",
    "new_loaders",
    "new_loaders --in_order",
    "one_cycle",
    "own_optimizer",
    "plateau",
    "tokens_accumulated",
    "trainer_clm",
    "trainer_subclass",
    "translation",
]
CLOSE = {
    # Means of what rank 0 has computed alone, whose samples are others at another world size.
    "gan": {"loss": 0.05},
    "glue": {"loss": 0.01},
    # A mean of the ranks' means over their tokens: another one where there are fewer ranks, for steps as many as come
    # before the arrival.
    "ner": {"loss": 0.01},
    # In the step whose collectives fail, what the lost rank would have contributed is lost.
    "one_cycle": {"losses": 0.02, "samples": 0.02},
    "trainer_subclass": {"loss": 5e-3, "average": 3e-3},
}
"""How close the script's own numbers are to those of a run without faults, where they are not the same to 1e-6."""

WEIGHTS = {
    # Each rank draws noise of its own.
    "gan": 0.02,
    # A rank's loss is a mean over its tokens, or over classes with weights, and samples have different numbers of them.
    "ner": 1e-4,
    "translation": 1e-3,
    "trainer_subclass": 3e-3,
    # A line search ends where the last digits say.
    "closures": 1e-4,
}
"""How close the norm of the weights is to that of the same step without faults, where it is not the same to 1e-6."""


def run(case, folder, *more, **options):
    name, *arguments = case.split()
    imports = LIGHTNING if name.startswith("lightning") else CORPUS / "toy.py"
    return run_observed(CORPUS / f"{name}.py", folder, *arguments, *more, imports=imports, **options)


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory):
    """Return the run of a case without faults, once for each: ``undisturbed(case)``."""

    @functools.cache
    def made(case, processes=1):
        return run(case, tmp_path_factory.mktemp("undisturbed") / "run", nodes=(2, 2), processes=processes)

    return made


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=ONE_PROCESS if case in SHARED else ANOTHER) for case in CASES]
)
def test_a_script_trains_under_faults_as_without(tmp_path, undisturbed, case):
    expected = undisturbed(case)
    found = run(case, tmp_path / "run", "--full", "2", nodes=(1, 2), chaos="kill=rank0@step:9,add@step:15")
    assert not found.report.missed_faults
    rolled_back = found.report.audit.rolled_back_steps
    assert rolled_back == 0 or case == "gan"  # in which the node may be lost between the updates of two models
    steps = expected.report.last_step
    assert found.report.last_step == steps == expected.record.get("completed_steps", steps)
    assert_same(found.record, expected.record, CLOSE.get(case, {}))
    assert_same_steps(observed(found), observed(expected), WEIGHTS.get(case, 1e-6), rolled_back)
    assert files(found) == files(expected)
    for folder in found.folder.glob("step_*"):
        assert json.loads((folder / "azureml-elastic.json").read_text())["steps"] == int(folder.name[5:])


@ONE_PROCESS
@pytest.mark.parametrize("case", ["averages", "clm --save_on_main --resume"])
def test_a_loss_after_the_last_step_leaves_what_the_script_has_computed(tmp_path, undisturbed, case):
    """The process that is left has finished its training, and another one repeats all of it to its end."""
    expected = undisturbed(case)
    last = expected.report.last_step
    found = run(case, tmp_path / "run", "--full", "2", nodes=(1, 2), chaos=f"kill=rank0@step:{last}")
    assert (found.report.last_step, found.report.audit.rolled_back_steps) == (last, 0)
    assert_same(found.record, expected.record, CLOSE.get(case, {}))
    assert files(found) == files(expected)


RANDOM = [case for case in CASES if case not in ("cross_validation", "gan", "looks_first", "one_cycle")]
RANDOM += ["ema_evaluated", "one_cycle"]
"""Scripts whose record does not depend on the number of ranks at the end, and whose steps update one model."""


@pytest.mark.parametrize("seed", range(FIRST, LAST))
def test_a_script_trains_under_random_faults_as_without(tmp_path, undisturbed, seed, record_property):
    """One node or the other is lost or preempted before an arrival; some lose rank 0's node after it again.

    A fifth of the runs have two workers a node.
    """
    draw = random.Random(seed)
    case = draw.choice(RANDOM)
    processes = 2 if seed % 5 == 4 else 1
    expected = undisturbed(case, processes)
    last = expected.report.last_step
    first = draw.randint(2, last // 2)
    arrival = first + draw.randint(2, 8)
    verb, victim = draw.choice(["kill", "kill", "freeze", "preempt"]), draw.choice(["rank0", "any"])
    chaos = f"{verb}={victim}@step:{first},add@step:{arrival}"
    # A node that comes takes part after a second or two; were the other one lost before, all would be lost.
    if arrival + 14 < last and draw.random() < 0.5:
        chaos += f",kill=rank0@step:{arrival + 14}"
    record_property("faults", f"{case}: {chaos}")
    full = str(2 * processes)
    found = run(case, tmp_path / "run", "--full", full, nodes=(1, 2), chaos=chaos, processes=processes)
    trail = f"seed {seed}: {case}, workers a node: {processes}, {chaos}; files in {found.folder.parent}"
    assert found.report.audit.rolled_back_steps == 0, trail
    assert found.report.last_step == last, trail
    assert_same(found.record, expected.record, {name: 2 * limit for name, limit in CLOSE.get(case, {}).items()})
    assert_same_steps(observed(found), observed(expected), WEIGHTS.get(case, 1e-6))
    assert files(found) == files(expected), trail


@ONE_PROCESS
def test_a_step_in_which_one_of_two_models_is_updated_does_not_count(tmp_path, undisturbed):
    expected = undisturbed("gan")
    found = run("gan --die_between_updates", tmp_path / "run", nodes=(2, 2))
    rolled_back = found.report.audit.rolled_back_steps
    assert rolled_back == 9  # there is no snapshot
    assert_same(found.record, expected.record, CLOSE["gan"])
    assert_same_steps(observed(found), observed(expected), WEIGHTS["gan"], rolled_back)


@ONE_PROCESS
def test_what_follows_a_collective_that_has_failed_is_done_by_the_next_process(tmp_path, undisturbed):
    """The optimizer has stepped, and the learning rate has not, when the ranks gather and one is gone.

    This happens within an epoch, at the end of one, and in a later one.
    """
    expected = undisturbed("one_cycle")
    found = run("one_cycle --die_before_gathering 9 20 33", tmp_path / "run", nodes=(2, 2))
    assert len(found.report.rounds) == 4
    assert found.report.audit.rolled_back_steps == 0
    assert_same(found.record, expected.record, CLOSE["one_cycle"])
    assert_same_steps(observed(found), observed(expected), 1e-6)


@ONE_PROCESS
@pytest.mark.parametrize(("steps", "direct"), [("9 20 21", ""), ("9 21", " --direct")], ids=["of_stack", "of_torch"])
def test_averages_that_follow_a_collective_that_has_failed_have_each_update_once(tmp_path, undisturbed, steps, direct):
    """Within an epoch, at the end of one, and in the first step of a later one, also right after that end."""
    found = run(f"averages --die_before_reducing {steps}{direct}", tmp_path / "run", nodes=(2, 2))
    assert len(found.report.rounds) == len(steps.split()) + 1
    assert found.report.audit.rolled_back_steps == 0
    assert_same(found.record, undisturbed("averages").record, {})


@ONE_PROCESS
@pytest.mark.parametrize(
    ("options", "batches"),
    [("--accumulate 2", "10"), ("--direct --reduce_first", "5 9")],
    ids=["in the second batch of a step", "behind repeated steps with a collective before the update"],
)
def test_only_a_call_behind_an_update_says_where_the_next_process_goes_on(tmp_path, options, batches):
    expected = run(f"averages {options}", tmp_path / "expected", nodes=(2, 2))
    found = run(f"averages {options} --die_before_reducing {batches}", tmp_path / "run", nodes=(2, 2))
    assert found.report.audit.rolled_back_steps == 0
    assert_same(found.record, expected.record, {})


@ONE_PROCESS
def test_ranks_that_have_passed_a_collective_go_on_with_those_in_which_it_has_failed(tmp_path):
    """Rank 2 has what rank 1 sends, while rank 1 waits for rank 0, which is gone: both are behind the same step."""
    expected = run("averages --broadcast", tmp_path / "expected", nodes=(3, 3))
    found = run("averages --broadcast --die_before_reducing 9", tmp_path / "run", nodes=(3, 3))
    assert found.report.audit.rolled_back_steps == 0
    assert_same(found.record, expected.record, {})


@ONE_PROCESS
@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("closures", "--die_in_update 9"),
        ("ema_evaluated", "--die_in_evaluation 0"),
        ("own_optimizer", "--die_in_evaluation 1"),
    ],
    ids=["in an update", "with other weights in their place", "in another mode of the optimizer"],
)
def test_weights_that_are_those_of_no_step_are_not_trained_on(tmp_path, undisturbed, case, options):
    expected = undisturbed(case)
    found = run(f"{case} {options}", tmp_path / "run", nodes=(2, 2))
    assert found.report.audit.rolled_back_steps == 0
    assert len(found.report.rounds) > len(expected.report.rounds)
    assert_same(found.record, expected.record, {})
    assert_same_steps(observed(found), observed(expected), 1e-6)


@ONE_PROCESS
@pytest.mark.parametrize("options", ["", " --resume", " --resume --save_on_main"])
def test_a_folder_whose_writing_was_cut_short_is_written_by_the_next_process(tmp_path, options):
    found = run(f"clm --die_in_save{options}", tmp_path / "run", nodes=(2, 2))
    assert found.report.audit.rolled_back_steps == 0
    folders = {path.name: sorted(file.name for file in path.iterdir()) for path in found.folder.glob("step_*")}
    assert folders.keys() == {f"step_{steps}" for steps in (10, 20, 30, 40)}
    # The folder that the script has loaded is written again by all ranks, each with its random state.
    assert set(folders["step_10"]) - set(folders["step_20"]) <= {"random_states_1.pkl"}
    assert set(folders["step_20"]) <= set(folders["step_10"])
    assert json.loads((found.folder / "step_10" / "azureml-elastic.json").read_text())["complete"]


@ONE_PROCESS
@pytest.mark.parametrize("case", ["fabric", "min_gpt", "nano_gpt"])
def test_a_loop_without_a_session_that_continues_from_its_own_file_ends_as_without_faults(tmp_path, case):
    """It trains again what it had not saved, with the same learning rates; a new node waits for a save.

    Its samples are divided by the script: how many steps they make, and in which order they come, depends on the ranks
    that there are. But it leaves no sample of an epoch out, and no step of a schedule by steps.
    """
    expected = run(case, tmp_path / "expected", nodes=(2, 2))
    faults = {"nodes": (1, 2), "chaos": "kill=rank0@2s,add@4s"}
    found = run(case, tmp_path / "run", "--full", "2", "--pause", "0.12", **faults)
    assert not found.report.missed_faults
    assert found.record == expected.record
    assert files(found) == files(expected)
    lines, wanted = observed(found), observed(expected)
    if case == "nano_gpt":  # an iteration is a step; which samples it draws at random depends on the ranks
        assert lines.keys() == wanted.keys() == {(0, step) for step in range(1, 61)}
        for key, each in lines.items():
            assert {(line["rate"], line["passes"] * line["ranks"]) for line in each} == {(wanted[key][0]["rate"], 4)}
    else:
        known_by = "rate" if case == "fabric" else "epoch"  # Fabric counts its epochs anew in each process
        assert epochs(lines, known_by) == epochs(wanted, known_by)
        assert list(epochs(wanted, known_by).values()) == [set(range(80))] * 6


def epochs(steps, known_by):
    """Return the samples of each epoch."""
    found = defaultdict(set)
    for lines in steps.values():
        for line in lines:
            found[line[known_by]].update(line["samples"])
    return found
