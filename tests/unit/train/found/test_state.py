"""The state that was found, as a tracked object of two processes of one rank."""

from __future__ import annotations

import collections
import copy
import logging
import types

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from azureml_elastic.checkpoint.state.tracked_state import TrackedState
from azureml_elastic.train.found.comparison import Change
from azureml_elastic.train.found.state import FoundState

ALONE = types.SimpleNamespace(rank=0, world_size=1)


class Average:  # in the shape of diffusers
    def __init__(self, parameters):
        self.shadow, self.updates = [each.detach().clone() for each in parameters], torch.zeros(1)

    def step(self, parameters):
        self.updates += 1
        for mine, each in zip(self.shadow, parameters, strict=True):
            mine.sub_(0.05 * (mine - each.detach()))


class Slots:
    __slots__ = ("value",)

    def __init__(self):
        self.value = torch.zeros(3, dtype=torch.bfloat16)


class Callback:
    def __init__(self, model):
        self.model = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))


class Centre(nn.Module):  # of DINO: a buffer that is bound anew
    def __init__(self):
        super().__init__()
        self.register_buffer("centre", torch.zeros(2))


def script(hook, steps=12):
    """A stranger's loop: hook(step, model, optimizer) is where a step begins, and returns whether it trains."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    data = torch.randn(steps, 8, 4)
    ema, teacher, callbacks, slots = Average(model.parameters()), copy.deepcopy(model), [[Callback(model)]], Slots()
    average = {key: value.detach().clone() for key, value in model.state_dict().items()}
    queue, pointer = torch.zeros(16, 4), torch.zeros((), dtype=torch.int64)
    by_data = collections.deque(each.detach().clone() for each in model.parameters())
    flat, phases, centre, late = torch.zeros(20), torch.zeros(2, dtype=torch.complex64), Centre(), None
    views = [flat[:10], flat[10:]]
    grown = []

    def keeps():
        held = torch.zeros(4, 4)

        def update():
            return held.lerp_(model[0].weight.detach(), 0.1)

        return update

    update = keeps()
    for step in range(steps):
        x = data[step]
        if hook(step, model, optimizer):
            optimizer.zero_grad()
            loss = (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
            loss.backward()
            optimizer.step()
            grown.append(loss.detach())
        ema.step(model.parameters())
        late = torch.zeros(2) if late is None else late.add_(model[2].bias.detach())
        with torch.no_grad():
            for mine, each in zip(teacher.parameters(), model.parameters(), strict=True):
                mine.mul_(0.99).add_(each, alpha=0.01)
            for key, value in model.state_dict().items():
                average[key].lerp_(value, 0.05)
            for mine, each in zip(by_data, model.parameters(), strict=True):
                mine.data.mul_(0.9).add_(each.data, alpha=0.1)
            queue[int(pointer) : int(pointer) + 4] = model[0].weight
            pointer.add_(4).remainder_(16)
            views[step % 2].add_(model[0].bias.detach().repeat(3)[:10])
            phases.add_(torch.complex(model[2].bias, -model[2].bias))
            slots.value.add_(model[2].bias.detach().repeat(2)[:3].bfloat16())
        centre.centre = centre.centre * 0.9 + 0.1 * model[2].bias.detach()
        callbacks[0][0].model.update_parameters(model)
        update()
    tensors = [*ema.shadow, ema.updates, *teacher.parameters(), *callbacks[0][0].model.state_dict().values()]
    tensors += [*average.values(), queue, pointer, *by_data, flat, phases, centre.centre, late, slots.value, update()]
    return [each.detach().clone() for each in (*model.parameters(), *tensors)]


class Lost(Exception):
    pass


def test_all_that_is_written_to_goes_on_in_the_next_process_where_it_was():
    expected, kept = script(lambda *_: True), {}
    first = FoundState()

    def interrupted(step, model, optimizer):
        if step == 0:
            first.attach(TrackedState({"model": model, "optimizer": optimizer}, found=first))
        first.begin_step(undone=False)
        if step in (2, 4):
            first.agree(ALONE)
        if step == 7:
            kept["tracked"] = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            plain, tensors = first.collect()
            kept["found"] = plain, {name: each.clone() for name, each in tensors.items()}
            raise Lost
        return True

    with pytest.raises(Lost):
        script(interrupted)
    paths = kept["found"][0]["details"].keys()
    assert not [path for path in paths if "loss" in path or path.startswith(("script.x", "script.grown"))]
    second = FoundState()
    second.repeated = True

    def repeating(step, model, optimizer):
        if step == 0:
            second.attach(TrackedState({"model": model, "optimizer": optimizer}, found=second))
            second.restore(*kept["found"])
            assert {*second.collect()[0]["details"]} == {*paths}  # also before they are where they belong
        if step == 7:
            model.load_state_dict(kept["tracked"][0])
            optimizer.load_state_dict(kept["tracked"][1])
        if step >= 7:
            second.begin_step(undone=False)
            assert {*second.collect()[0]["details"]} == {*paths}
        return step >= 7

    assert all(map(torch.equal, script(repeating), expected))
    assert {*second.collect()[0]["details"]} == {*paths}  # also for the last checkpoint, after the end of the loop


def tracked(found, **objects):
    model = nn.Linear(2, 2)
    state = TrackedState({"model": model, **objects}, found=found)
    found.attach(state)
    return state


def test_what_is_not_there_any_more_is_named_once_and_the_rest_is_restored(caplog):
    found = FoundState()
    state = tracked(found)

    def changing():
        kept, gone = torch.zeros(2), torch.zeros(3)
        for step in range(4):
            found.begin_step(undone=False)
            kept += 1
            gone += 1
            if step == 2:
                found.agree(ALONE)
        plain, tensors = state.collect(is_main=True)
        return plain, {name: each.clone() for name, each in tensors.items()}

    saved, again = changing(), FoundState()
    state = tracked(again)

    def changed():
        kept, gone = torch.zeros(2), torch.zeros(4)
        targets = state.targets(saved[0])
        assert targets["found/changing.kept"].shape == (2,)
        assert state.check("here", saved[0], {}, {}) is not None  # the stored tensors of the model are missing
        assert state.restore(*saved) == []
        again.begin_step(undone=False)
        return kept, gone

    changed.__code__ = changed.__code__.replace(co_name="changing")
    with caplog.at_level(logging.WARNING):
        assert [each.tolist() for each in changed()] == [[4.0, 4.0], [0.0] * 4]
    assert ["changing.gone: state" in each.message for each in caplog.records] == [True]


def test_a_checkpoint_without_it_is_restored_and_refused_for_other_names():
    state = TrackedState({"model": nn.Linear(2, 2)})
    plain, tensors = state.collect(is_main=True)
    found = FoundState()
    assert tracked(found).restore(plain, tensors) == []
    with_found, more = tracked(found).collect(is_main=True)
    assert state.names == ["model"]
    assert {*with_found} == {"model", "found"}
    assert not [name for name in more if name.startswith("found/")]


def test_registered_objects_are_restored_by_their_own_functions_alone():
    class Registered:
        def __init__(self):
            self.value = torch.zeros(1)

        def state_dict(self):
            return {"value": self.value}

        def load_state_dict(self, state):
            self.value.copy_(state["value"])

    registered, found = Registered(), FoundState()
    state = tracked(found, average=registered)

    def loop():
        holder = {"again": registered}
        for _ in range(3):
            found.begin_step(undone=False)
            found.agree(ALONE)
            registered.value += 1
        return state.collect(is_main=True)[0]["found"], holder

    assert loop()[0]["details"] == {}


def test_a_step_that_is_undone_is_undone_in_what_was_found():
    found = FoundState()
    tracked(found)

    def loop():
        queue = torch.zeros(2)
        for step in range(6):
            found.begin_step(undone=True)
            queue.data.add_(1)  # in the forward pass
            if step == 5:
                found.undo_step()
                break
            found.begin_update()
            if step == 1:
                found.agree(ALONE)
        undo = found.capture()
        queue += 7
        undo()
        return queue

    assert loop().tolist() == [5.0, 5.0]


def test_what_changes_in_repeated_steps_alone_is_state():
    found = FoundState()
    found.repeated = True
    state = tracked(found)

    def loop():
        by_epoch = torch.zeros(2)  # an average of an epoch that ended with the last repeated step
        found.begin_repeated_steps()
        by_epoch += 1
        found.begin_step(undone=False)
        found.begin_update()
        found.agree(ALONE)
        return state.collect(is_main=True)[0]["found"]

    assert [path.rpartition(".")[2] for path in loop()["details"]] == ["by_epoch"]


def test_what_changes_after_the_commit_and_what_is_bound_anew_is_named_once(caplog):
    found = FoundState()
    tracked(found)

    def loop():
        late, early, total = torch.zeros(2), torch.zeros(2), torch.zeros(2)
        for _ in range(9):
            x = torch.ones(2)
            found.begin_step(undone=False)
            early += x
            total = total + x
            found.agree(ALONE)
            found.end_commit()
            late += 1
        return late, early, total

    with caplog.at_level(logging.WARNING):
        loop()
    paths = [each.message.partition(":")[0] for each in caplog.records]
    assert paths == ["loop.total", "loop.late"]


class Two:
    """Two ranks, of which the other has the values of one more sample."""

    rank, world_size = 0, 2

    def gather(self, mine):
        tensors, numbers = mine
        others = {path: Change(each.checksum + ("own" in path), each.buffer) for path, each in tensors.items()}
        return [mine, (others, numbers)]


@pytest.mark.parametrize(("control", "known"), [(ALONE, {"loop.own", "loop.both"}), (Two(), {"loop.both"})])
def test_what_a_rank_has_of_its_own_is_named_and_what_is_too_young_where_there_are_several(caplog, control, known):
    found = FoundState()
    tracked(found)

    def loop():
        own, both, young = torch.zeros(2), torch.zeros(2), torch.zeros(2)
        for step in range(6):
            found.begin_step(undone=False)
            own += 1
            both += 1
            if step < 4:
                found.agree(control)
            else:
                young += 1
        found.end_round(control.world_size)
        return found.collect()[0]["details"].keys()

    with caplog.at_level(logging.WARNING):
        kept = loop()
    paths = [each.message.partition(":")[0] for each in caplog.records]
    if control is ALONE:
        assert (kept, paths) == (known | {"loop.young"}, [])
    else:
        assert (kept, paths) == (known, ["loop.own", "loop.young"])


def test_results_of_inference_mode_are_compared_as_others_are():
    """They have no version counter, and evaluations leave them in variables."""
    state = FoundState()
    with torch.inference_mode():
        result = torch.zeros(2)
    tracked(state)
    for step in range(1, 5):
        state.begin_step(undone=True)
        with torch.inference_mode():
            result += 1
        state.begin_update()
        state.agree(ALONE)
        assert float(result[0]) == step
    plain, _ = state.collect()
    assert [path for path in plain["details"] if path.endswith(".result")]


def test_what_changes_first_at_the_end_of_an_epoch_begins_anew_in_the_process_that_runs_that_code_again():
    """A node comes between two epochs, when one other trains: what it has is state at once."""
    model, each_step, each_epoch = nn.Linear(2, 2), torch.zeros(2), torch.zeros(2)
    found = FoundState()
    found.repeated = True
    found.attach(TrackedState({"model": model}, found=found))
    kept = []
    for _ in range(2):
        for _ in range(3):
            found.begin_step(undone=False)
            found.agree(ALONE)
            each_step.add_(1)
        found.begin_epoch_end()
        each_step.add_(1)
        each_epoch.add_(1)
        found.end_round(1)
        kept.append({name.rpartition(".")[2]: float(each[0]) for name, each in found.collect()[1].items()})
    assert kept == [{"each_step": 3.0}, {"each_step": 7.0, "each_epoch": 1.0}]
