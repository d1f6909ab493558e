"""What a script keeps is found by path, and nothing of the script's is called."""

from __future__ import annotations

import collections
import functools
import sys
import threading
import types
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from azureml_elastic.train.found.search import frames_of, memory_key, search


class Slotted:
    __slots__ = ("held", "unset")

    def __init__(self):
        self.held = torch.zeros(2)


@dataclass
class Held:
    value: torch.Tensor


class Forbidding:
    """It runs only where the script is called."""

    def __init__(self):
        self.__dict__["inner"] = torch.zeros(3)

    def __getattr__(self, name):
        raise AssertionError(name)

    @property
    def total(self):
        raise AssertionError

    def __iter__(self):
        raise AssertionError

    def __len__(self):
        raise AssertionError

    def __eq__(self, other):
        raise AssertionError

    __hash__ = None


class OwnDict(dict):
    def items(self):
        raise AssertionError


def script(look):
    """A function whose variables are looked for."""
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    module.note = torch.zeros(1)
    slotted, held, forbidding = Slotted(), Held(torch.zeros(1)), Forbidding()
    own = OwnDict(value=torch.zeros(1))
    nested = {"a": [torch.zeros(1), (torch.zeros(2), collections.deque([torch.zeros(3)]))], 5: torch.zeros(4)}
    namespace = types.SimpleNamespace(average=torch.zeros(1))
    inside = torch.zeros(7)

    def closure():
        return inside

    partial = functools.partial(closure, torch.zeros(8))
    method = held.__eq__
    kinds = [
        torch.zeros((), dtype=torch.int64),
        torch.zeros(2, dtype=torch.bfloat16),
        torch.zeros(1, dtype=torch.complex64),
    ]
    result = look()
    del module, slotted, forbidding, own, nested, namespace, partial, method, kinds
    return result


def look(**options):
    own = search(frames_of(threading.get_ident()), **options)
    return {each.path: each for each in own.tensors if each.path.startswith("script.")}


def test_a_tensor_is_found_in_any_holder():
    found = script(look)
    assert {
        "script.module.0.weight",
        "script.module.1.running_mean",
        "script.module.note",
        "script.slotted.held",
        "script.held.value",
        "script.forbidding.inner",
        "script.own['value']",
        "script.nested['a'][0]",
        "script.nested['a'][1][1][0]",
        "script.nested[5]",
        "script.namespace.average",
        "script.inside",
        "script.partial.args[0]",
        "script.kinds[0]",
        "script.kinds[1]",
        "script.kinds[2]",
    } <= found.keys()
    assert [path for path, each in found.items() if each.buffer] == [
        "script.module.1.running_mean",
        "script.module.1.running_var",
        "script.module.1.num_batches_tracked",
    ]
    assert found["script.inside"].local
    assert not found["script.held.value"].local


def test_a_closure_alone_leads_to_what_it_keeps():
    def make():
        kept = torch.zeros(3)
        return lambda: kept.add_(1)

    def holder():
        update = make()
        found = search(frames_of(threading.get_ident()))
        update()
        return [each.path for each in found.tensors if each.path.startswith("holder.")]

    assert holder() == ["holder.update<kept>"]


def test_a_path_is_the_same_after_an_error_that_an_outer_frame_of_the_same_name_has_not_seen():
    def frame(inner):
        kept = torch.zeros(2)
        if inner:
            within.extend(paths(search(frames_of(threading.get_ident()))))
            raise ValueError
        try:
            catch()
        finally:
            kept.zero_()

    def catch():
        try:
            frame(inner=True)
        except ValueError as error:
            afterwards.extend(paths(search(frames_of(0, error))))

    def paths(found):
        return [each.path for each in found.tensors if each.path.startswith("frame")]

    within, afterwards = [], []
    frame(inner=False)
    assert within == ["frame#2.kept", "frame.kept"]
    assert afterwards == ["frame.kept"]


def test_what_is_tracked_and_what_is_data_is_left_out():
    def holder():
        model = nn.Linear(2, 2)
        view = model.weight[0].detach()
        dataset = TensorDataset(torch.zeros(4))
        loader = DataLoader(dataset)
        optimizer = torch.optim.Adam(model.parameters())
        registered = Held(torch.zeros(1))
        loss = model(torch.ones(1, 2)).sum()
        generator, empty = torch.Generator(), torch.zeros(0)
        found = search(
            frames_of(threading.get_ident()), {memory_key(each) for each in model.parameters()}, {id(registered)}
        )
        del view, loader, optimizer, loss, generator, empty
        return [each.path for each in found.tensors if each.path.startswith("holder.")]

    assert holder() == []


def test_of_a_variable_and_a_container_both_paths_are_known():
    def holder():
        averages = [Held(torch.zeros(1)), Held(torch.zeros(1))]
        for each in averages:
            assert each is not None
        found = search(frames_of(threading.get_ident()))
        return {each.path: each.others for each in found.tensors if each.path.startswith("holder.")}

    assert holder() == {"holder.each.value": ("holder.averages[1].value",), "holder.averages[0].value": ()}


def test_frames_of_an_error_and_of_another_thread_are_those_of_the_script():
    kept = {}

    def failing():
        average = torch.zeros(1)
        kept["is"] = average
        raise RuntimeError

    with pytest.raises(RuntimeError) as raised:
        failing()
    found = search(frames_of(0, raised.value)).tensors
    assert "failing.average" in [each.path for each in found]

    begun, ends = threading.Event(), threading.Event()

    def blocked():
        average = torch.zeros(1)
        begun.set()
        ends.wait(20)
        return average

    thread = threading.Thread(target=blocked)
    thread.start()
    begun.wait(20)
    paths = [each.path for each in search(frames_of(thread.ident)).tensors]
    ends.set()
    thread.join()
    assert paths == ["blocked.average"]


def test_globals_of_a_module_whose_function_runs_are_found():
    module = types.ModuleType("library_of_a_script")
    module.search, module.frames_of, module.threading, module.torch = search, frames_of, threading, torch
    exec("average = torch.zeros(1)\ndef run():\n    return search(frames_of(threading.get_ident()))", vars(module))
    assert "library_of_a_script.average" in [each.path for each in module.run().tensors]


def test_what_runs_the_script_as_a_test_is_not_looked_into(request):
    """From it all other tests are reachable, and with them whatever these hold."""
    held = request.config.held_by_pytest = torch.zeros(1)
    try:
        found = search(frames_of(threading.get_ident())).tensors
    finally:
        del request.config.held_by_pytest
    assert [each.path.rpartition(".")[2] for each in found if each.tensor is held] == ["held"], "the variable alone"
    assert not [each for each in found if each.tensor is held and each.others]


@pytest.mark.parametrize("count", [30_000])
def test_containers_with_many_elements_are_data(count):
    def holder():
        many = [torch.zeros(1) for _ in range(count)]
        few = many[:3]
        found = search(frames_of(threading.get_ident()))
        return [each.path for each in found.tensors if each.path.startswith("holder.") and many], few

    assert holder()[0] == ["holder.few[0]", "holder.few[1]", "holder.few[2]"]


def test_objects_of_a_stack_hold_nothing_of_the_scripts_but_lead_to_it():
    trainer = type("Trainer", (), {"__module__": "lightning.pytorch.trainer.trainer"})()
    trainer.value = torch.zeros(1)
    trainer.callbacks = [Held(torch.zeros(1))]

    def holder(trainer):
        return [each.path for each in search([sys._getframe()]).tensors]

    assert holder(trainer) == ["holder.trainer.callbacks[0].value"]


def test_variables_that_a_statement_updates_are_distinguished_from_those_that_it_binds():
    def holder(samples):
        average = total = scaled = torch.zeros(1)
        for x, y in samples:
            loss = x * y
            average = 0.9 * average + (0.1 * loss)
            total, scaled = total + loss, loss * 2
        found = search(frames_of(threading.get_ident()))
        return {each.path: each.updated for each in found.tensors if each.path.startswith("holder.")}, (x, y, scaled)

    found = holder([(torch.ones(1), torch.ones(1))] * 2)[0]
    assert {path for path, updated in found.items() if updated} == {"holder.average", "holder.total"}
    assert {"holder.x", "holder.y", "holder.loss", "holder.scaled"} <= found.keys()


def test_what_a_loop_takes_as_its_next_element_is_as_local_as_the_variable():
    def holder(batches, kept):
        for index, batch in enumerate(batches):
            for callback in kept:  # noqa: B007
                changed = {key: value * index for key, value in batch.items()}
                changed = {**changed}
                found = search(frames_of(threading.get_ident()))
        return {each.path: each.local for each in found.tensors if each.path.startswith("holder.")}, callback

    batches = ({"x": torch.ones(1), "y": [torch.ones(1)]} for _ in range(2))
    local = holder(batches, [Derived()])[0]
    assert local == {
        "holder.batch['x']": True,
        "holder.batch['y'][0]": True,
        "holder.callback.own": False,
        "holder.changed['x']": False,
    }


class Base:
    """Of a stack, by its module."""

    def __init__(self):
        self.sum_of_the_stack = torch.zeros(1)


Base.__module__ = "transformers.trainer"


class Derived(Base):
    def __init__(self):
        super().__init__()
        self.own = torch.zeros(1)


def test_tensors_that_a_stack_sets_in_an_object_of_the_scripts_are_the_stacks():
    def holder(trainer):
        found = search([sys._getframe()])
        return [each.path for each in found.tensors], found.derived, trainer

    paths, derived, trainer = holder(Derived())
    assert (paths, derived) == (["holder.trainer.own"], [("holder.trainer", trainer)])
