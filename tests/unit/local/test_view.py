"""What the views show of nodes and of their lines."""

import io
import subprocess
import sys

import pytest
from rich.console import Console

from azureml_elastic.ledger.events import HealthChecked, NodeReady, NodeStarted, RoundEntered, WorkersStarted
from azureml_elastic.ledger.picture import Moment, Picture
from azureml_elastic.local.view import LiveView, PlainView
from azureml_elastic.log_lines import message_of_line

LOGS = """
import logging, sys
from azureml_elastic.log_lines import write_log_lines
write_log_lines(sys.argv[1])
logging.getLogger("azureml_elastic.node.agent.agent").info("Round 1: rank 0 of 1 node, 1 worker.")
logging.getLogger("azureml_elastic.forks.client").debug("a detail")
logging.getLogger("azure.core.pipeline").warning("another package")
logging.getLogger("azure.core.pipeline").debug("a detail of another package")
"""


@pytest.mark.parametrize("level", ["", "debug"])
def test_lines_have_short_names_and_details_on_request_alone(level):
    done = subprocess.run([sys.executable, "-c", LOGS, level], check=True, capture_output=True, text=True)
    lines = done.stderr.splitlines()
    details = ["DEBUG azureml_elastic.client: a detail"] if level else []
    assert [line.partition(",")[2][4:] for line in lines] == [
        "INFO azureml_elastic.agent: Round 1: rank 0 of 1 node, 1 worker.",
        *details,
        "WARNING azure.core.pipeline: another package",
    ]
    assert message_of_line(lines[0]) == "Round 1: rank 0 of 1 node, 1 worker."
    assert message_of_line("[rank0]: INFO x: y") == "[rank0]: INFO x: y"


def test_what_nodes_do_before_the_first_step():
    picture = Picture()
    states = []

    def apply(*events):
        picture.apply(events)
        states.append([node.state for node in picture.now.nodes])

    picture.expect("a", "queued")
    apply()
    picture.expect("a")
    picture.expect("b")
    apply()
    apply(NodeStarted(time=1, node="a", host="", pid=1), HealthChecked(time=2, node="a", status="ok", seconds=0.1))
    picture.expect("a", "queued")  # as its job's state was read before the event
    apply(NodeReady(time=3, node="a"))
    apply(RoundEntered(time=4, node="a", round=1, rank=0, members=("a",), world_size=1))
    apply(WorkersStarted(time=5, node="a", round=1, pids=(1,)))
    assert states == [
        ["queued"],
        ["starting", "starting"],
        ["preparing", "starting"],
        ["joining", "starting"],
        ["joined", "starting"],
        ["workers started", "starting"],
    ]


def test_the_live_view_shows_messages_without_date_and_logger():
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    with LiveView(console) as view:
        picture = Picture()
        picture.expect("node-0")
        view.output("node-0", ["2026-01-02 03:04:05,678 INFO azureml_elastic.agent: Round 1: rank 0 of 1 node."])
        view.events(picture.now, [])
        view._live.refresh()
    text = console.file.getvalue()
    assert "starting" in text
    assert "Round 1: rank 0 of 1 node." in text
    assert "2026-01-02" not in text


def test_the_plain_view_says_which_nodes_have_started():
    console = Console(file=io.StringIO())
    PlainView(console).events(Moment(), [NodeStarted(time=1, node="a", host="", pid=1)])
    assert console.file.getvalue() == "* a has started\n"
