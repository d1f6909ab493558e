"""Silence is counted without the time in which this process was paused."""

from __future__ import annotations

import itertools
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from azureml_elastic.config import RendezvousTimings
from azureml_elastic.node.core.pauses import BeatWatch, PauseDetector, SilenceLimit

TICK = 0.5


@given(st.lists(st.floats(0.0, 5.0), max_size=40), st.floats(0.0, 1.0))
def test_only_pauses_are_subtracted(gaps, part):
    moments = [*itertools.accumulate(gaps, initial=100.0)]
    detector = PauseDetector(moments[0], TICK)
    for now in moments[1:]:
        detector.tick(now)
    now = moments[-1]
    since = moments[0] + part * (now - moments[0])
    late = [after - before for before, after in itertools.pairwise(moments) if after > since]
    away = sum(gap - TICK for gap in late if gap > 2 * TICK)
    assert detector.silence(since, now) == pytest.approx(now - since - away, abs=1e-6)


def test_silence_is_detected_on_a_machine_that_is_always_late():
    since = now = 100.0
    detector = PauseDetector(now, TICK)
    for _ in range(10_000):
        now += 4 * TICK
        detector.tick(now)
        assert detector.silence(now, now) == 0
    assert detector.silence(now - 100 * TICK, now) == pytest.approx(25 * TICK)
    assert detector.silence(since, now) >= 10_000 * TICK


@pytest.mark.parametrize(
    ("pauses", "given_up"), [([2.5], True), ([2.4], False), ([1.5, 1.5], True), ([2.5, *[0.5] * 12], False)]
)
def test_a_process_that_did_not_run_for_almost_the_timeout_was_given_up_until_it_has_run_for_a_while(pauses, given_up):
    now = 100.0
    detector = PauseDetector(now, TICK)
    for seconds in pauses[:-1]:
        now += seconds
        detector.tick(now)
    assert detector.was_given_up(3.0, now + pauses[-1]) == given_up


# --- the limit of silence --------------------------------------------------------------------------------------------

BEAT = 0.25
"""Seconds between two beats by the usual timings."""


class Peer:
    """A peer that sends beats, as one process sees it."""

    def __init__(self, limit=None):
        self.limit = limit or SilenceLimit(RendezvousTimings())
        self.now = self.last = 100.0
        self._pauses = PauseDetector(self.now, BEAT)
        self._watch = BeatWatch(self.limit, self._pauses, self.now)

    def beats(self, count):
        for _ in range(count):
            self.now = self.last = self.now + BEAT
            assert not self.look()

    def look(self):
        self._pauses.tick(self.now)
        return self._watch.is_lost(self.last, self.now)

    def silent_until_lost(self):
        """Return the seconds of its silence until it counts as lost."""
        began = self.now
        while not self.look():
            self.now += BEAT
        return self.now - began

    def pause(self, seconds):
        """Let it pause, and go on unless it is given up before."""
        until = self.now + seconds
        while self.now < until:
            self.now = min(until, self.now + BEAT)
            if self.look():
                self.limit.gave_up("i", self.last)
                self.now = until
                self.limit.returned("i", self.now)
                return False
        self.last = self.now
        return not self.look()


def test_a_peer_whose_beats_are_known_and_regular_is_lost_after_a_third_of_the_time():
    peer = Peer()
    peer.beats(3)
    assert peer.silent_until_lost() == pytest.approx(3.25)
    peer = Peer()
    peer.beats(12)
    assert peer.silent_until_lost() == pytest.approx(1.25)


def test_a_pause_is_outlasted_once_one_was_seen_of_any_peer():
    peer = Peer()
    peer.beats(12)
    assert not peer.pause(1.9)
    other = Peer(peer.limit)
    other.beats(12)
    assert other.pause(1.9)
    assert other.pause(2.5)
    other.beats(12)
    assert other.silent_until_lost() == pytest.approx(4.75), "no longer than one and a half of the timeout"


def test_what_no_limit_outlasts_teaches_nothing():
    peer = Peer()
    peer.beats(12)
    assert not peer.pause(60.0)
    assert peer.limit.pause == 0.0


def test_pauses_of_this_process_and_late_looks_are_not_the_peers():
    peer = Peer()
    peer.beats(12)
    for _ in range(20):
        peer.now = peer.last = peer.now + 1.9 * BEAT
        assert not peer.look()
    peer.now += 30.0
    assert not peer.look()
    peer.last = peer.now
    assert not peer.look()
    assert peer.limit.pause < BEAT
    assert peer.silent_until_lost() == pytest.approx(1.25)


def test_others_may_have_given_this_process_up_by_the_limit_that_they_had_before_its_pause():
    limit = SilenceLimit(RendezvousTimings())
    limit.learn(1.5, 100.0)
    assert limit.seconds(100) == pytest.approx(3.5)
    assert limit.smallest(101.0) == pytest.approx(1.0)
    assert limit.smallest(110.0) == pytest.approx(3.5)
    limit.learn(2.0, 111.0)
    limit.learn(1.9, 112.0)
    assert limit.smallest(113.0) == pytest.approx(3.5)


@given(st.floats(0.1, 5.0), st.floats(2.01, 20.0))
def test_limits_are_in_order_and_several_beats_may_be_late(interval, factor):
    timings = RendezvousTimings(
        heartbeat_interval=timedelta(seconds=interval), heartbeat_timeout=timedelta(seconds=interval * factor)
    )
    limit = SilenceLimit(timings)
    assert 2 * interval * 0.999 <= limit.shortest <= limit.timeout <= limit.longest
