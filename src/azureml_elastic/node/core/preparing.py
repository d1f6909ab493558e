"""How a node's workers get ready before it asks for a place, so that nobody waits for their imports and their data.

::

    READING ──> WARMING or ANNOUNCED ──> PARKING ──> CHECKING ──> READY
                                            └─────> REPLACING ──────^

- **Reading** where the run is, a node that has been in no round decides how long to wait.
- **Warming**, it waits until new workers would start fast. Where workers make their imports themselves, it waits
  **announced** for the announcements of others.
- Workers that stay over the rounds are **parking**: they hand their state over and wait for a place. It is **checked**
  whether the others have gone on without this node; then, and where they do not park, they are **replaced** by new ones
  that run up to their session.
"""

from __future__ import annotations

from enum import Enum

from azureml_elastic.config import Plan
from azureml_elastic.node.core import actions as do
from azureml_elastic.node.core import events as ev
from azureml_elastic.node.core.round import NewestRound, Round

_ANNOUNCEMENT_SECONDS = 1.0
"""How long a node whose workers make their imports themselves waits for the announcements of others."""

_READY_SECONDS = 600.0
"""How long a newcomer waits for the imports of its preload server, after which it joins without them."""

_WARM_SECONDS = 30.0
"""How long a newcomer gets ready beyond its script's imports."""

_CHECK_SECONDS = 10.0
"""Time between two reads of the table by a newcomer that gets ready, in case the run ends meanwhile."""


class Stage(Enum):
    """See the module."""

    READING = "reading"
    WARMING = "warming"
    ANNOUNCED = "announced"
    PARKING = "parking"
    CHECKING = "checking"
    REPLACING = "replacing"
    READY = "ready"


class Preparation:
    """The workers of one node, before each of its rounds.

    Args:
        stays: whether the workers stay over the rounds.

    Attributes:
        waited: whether it took time.
    """

    def __init__(self, node: str, plan: Plan, newest: NewestRound, *, stays: bool) -> None:
        self.stage = Stage.READY
        self.waited = False
        self._node = node
        self._newest = newest
        self._stays = stays
        self._expects_others = plan.resources.max_instance_count > 1
        self._handover = plan.distribution.handover_timeout.total_seconds()
        self._before: Round | None = None
        self._found: Round | None = None
        self._settles = False
        self._is_first = self._is_spare = False
        self._until = 0.0
        self._read_at = 0.0
        self._warm_since: float | None = None
        self._ready_at: float | None = None

    def begin(self, before: Round | None) -> list[do.Action]:
        """Begin before the first round, or after one.

        Args:
            before: the round in which the node was last.
        """
        self._before, self._found, self._is_first, self._is_spare = before, None, before is None, False
        self.stage = Stage.READING
        return [do.ReadRound()] if before is None else []

    def begin_as_spare(self, now: float) -> None:
        """Begin before the node waits beside a round: it only has its imports made."""
        self._is_spare = True
        self._warm_up(now)

    def _warm_up(self, now: float, *, settle: bool = False) -> None:
        """Wait until new workers would start fast.

        The wait ends early where workers cannot be preloaded, and ten minutes after the first one began.

        Args:
            settle: whether to wait, for up to 30 s, for imports that only make the first steps faster, too.
        """
        self.stage, self._settles, self.waited = Stage.WARMING, settle, False
        self._warm_since = now if self._warm_since is None else self._warm_since
        self._read_at = now + _CHECK_SECONDS

    def handle(self, event: ev.NodeEvent, now: float) -> list[do.Action]:
        """Take one event in, and return what shall be done."""
        if isinstance(event, ev.RoundRead):
            self._found = event.round
            if event.round.closed:
                self.stage = Stage.READY  # joining shows how the run has ended
            return []
        if not isinstance(event, ev.ReadinessSeen):
            return []
        match self.stage:
            case Stage.READING:
                return self._begin(event, now)
            case Stage.WARMING:
                return self._warm(event, now)
            case Stage.ANNOUNCED if now >= self._until:
                return self._go_on(event, now)
            case Stage.PARKING:
                return self._park(event, now)
            case Stage.CHECKING:
                return self._check(event)
            case Stage.REPLACING if event.parked:
                self.stage = Stage.READY
            case Stage.REPLACING if event.ended:
                return [do.FailEarly()]  # a script without a session ends before it parks: nothing would ever come
        return []

    def _begin(self, seen: ev.ReadinessSeen, now: float) -> list[do.Action]:
        found = self._found
        if found is None:
            return self._go_on(seen, now)
        if found.number > 1 or found.state == "sealed":
            self._warm_up(now, settle=found.state == "sealed")
        # A round that is sealed before its workers can start begins no earlier, but without the nodes that come a
        # moment later: each of them has announced itself by then, and the first round waits for these.
        elif self._expects_others and seen.preloaded:
            self._warm_up(now)
        elif self._expects_others:
            self.stage, self._until = Stage.ANNOUNCED, now + _ANNOUNCEMENT_SECONDS
            return []
        else:
            return self._go_on(seen, now)
        return self._warm(seen, now)

    def _go_on(self, seen: ev.ReadinessSeen, now: float) -> list[do.Action]:
        """After the imports, or after a round."""
        actions: list[do.Action] = []
        if self._is_first:
            self._is_first = False
            actions.append(do.RecordReady())
        if self._stays and not self._is_spare:
            self.stage, self._until = Stage.PARKING, now + self._handover
            return [*actions, *self._park(seen, now)]
        if seen.importing and self.stage is not Stage.WARMING:  # the others do not wait for this node
            self._warm_up(now)
            return [*actions, *self._warm(seen, now)]
        self.stage = Stage.READY
        return actions

    def _warm(self, seen: ev.ReadinessSeen, now: float) -> list[do.Action]:
        assert self._warm_since is not None
        if seen.ready:
            self._ready_at = now if self._ready_at is None else self._ready_at
        is_warm = self._ready_at is not None and (not self._settles or now - self._ready_at >= _WARM_SECONDS)
        if seen.settled or (seen.ready and is_warm):
            return self._go_on(seen, now)
        if not seen.ready and now - self._warm_since >= _READY_SECONDS:
            text = (
                f"The script's imports have not ended within {_READY_SECONDS:.0f} s; joining without them. The other "
                "nodes may have to wait for this one's workers."
            )
            return [*([do.Log(text, warning=True)] if self.waited else []), *self._go_on(seen, now)]
        self.waited = True
        if now < self._read_at:
            return []
        self._read_at = now + _CHECK_SECONDS
        return [do.ReadRound()]

    def _park(self, seen: ev.ReadinessSeen, now: float) -> list[do.Action]:
        if seen.alive and not seen.parked and now < self._until:
            return []
        if not (seen.alive and seen.parked):
            return self._replace()
        self.stage, self._found = Stage.CHECKING, None
        newer = None if self._before is None else self._newest.after(self._before)
        if newer is None or newer.closed:
            return [do.ReadRound()]
        self._found = newer
        return self._check(seen)

    def _check(self, seen: ev.ReadinessSeen) -> list[do.Action]:
        """Keep the workers, unless they may be at another place than the furthest step."""
        found, before = self._found, self._before
        if found is None:
            return []
        is_left_out = before is not None and found.number > before.number and self._node not in found.previous
        if is_left_out or not (seen.alive and seen.parked):
            return self._replace()  # they hand their state over to new ones
        self.stage = Stage.READY
        return []

    def _replace(self) -> list[do.Action]:
        self.stage = Stage.REPLACING
        return [do.ReplaceWorkers()]
