"""The handlers of the signals that stop a local run."""

import os
import signal
import threading

import pytest

from azureml_elastic.local.run_end import StopSignals

ALL = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def handlers():
    """Python's default handlers, and afterwards those that were there before."""
    before = {number: signal.getsignal(number) for number in ALL}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", ALL)
def test_held_signals_are_collected_and_raised_later(number):
    with StopSignals() as signals:
        signals.hold()
        assert signals.first is None
        signals.raise_received()
        os.kill(os.getpid(), number)
        assert (signals.first, signals.hurried) == (number, False)
        os.kill(os.getpid(), signal.SIGTERM)
        assert (signals.first, signals.hurried) == (number, True)
        with pytest.raises((KeyboardInterrupt, SystemExit)) as raised:
            signals.raise_received()
    assert raised.type is (KeyboardInterrupt if number == signal.SIGINT else SystemExit)
    assert getattr(raised.value, "code", 130) == 128 + number


@pytest.mark.parametrize("number", ALL)
def test_before_that_the_first_signal_is_raised_at_once_and_the_others_are_collected(number):
    with StopSignals() as signals:
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)
        assert signals.hurried


def test_the_handlers_are_restored():
    before = [signal.getsignal(number) for number in ALL]
    with StopSignals():
        assert all(signal.getsignal(number) not in before for number in ALL)
    assert [signal.getsignal(number) for number in ALL] == before


def test_ignored_signals_and_handlers_of_the_program_stay():
    """``nohup`` ignores SIGHUP."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    received = []
    signal.signal(signal.SIGTERM, lambda *arguments: received.append(arguments))
    with StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.first is None
    assert len(received) == 1
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def test_a_thread_has_no_handlers():
    before = [signal.getsignal(number) for number in ALL]
    seen = []

    def run():
        with StopSignals():
            seen.extend(signal.getsignal(number) for number in ALL)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == before
