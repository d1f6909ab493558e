"""Events, actions and messages: one name, one class."""

from __future__ import annotations

import inspect
from collections import Counter

import pytest

from azureml_elastic.ipc import agent_messages, worker_messages
from azureml_elastic.node.core import actions, events, hub_state, messages
from azureml_elastic.node.core.actions import Action
from azureml_elastic.node.core.events import NodeEvent, RowSeen


def own(module):
    return {each for _, each in inspect.getmembers(module, inspect.isclass) if each.__module__ == module.__name__}


def test_no_two_events_actions_or_messages_have_the_same_name():
    modules = (actions, agent_messages, events, hub_state, messages, worker_messages)
    names = Counter(each.__name__ for module in modules for each in own(module))
    assert len(names) > 100
    assert {name for name, count in names.items() if count > 1} == set()


@pytest.mark.parametrize(("module", "unions"), [(events, NodeEvent | RowSeen), (actions, Action)])
def test_each_event_and_action_is_taken_or_given_by_a_machine(module, unions):
    parts = {"Hang", "Pace"}  # of events
    assert {each.__name__ for each in own(module) - set(unions.__args__)} <= parts
