"""Break behaviours that are guaranteed, one at a time, and verify that the tests notice each.

``python tools/mutations.py [NAME ...]`` works on a copy of the tree. For each mutation it runs the tests that shall
notice it, all of which ``python -m nox`` runs, too, and random schedules of all nodes for what a node decides. The exit
code is 1 where a mutation survives, and 2 where the tests fail without any.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILES = ("pyproject.toml", "noxfile.py", "README.md", "mkdocs.yml")
SCHEDULES = 1000
"""Number of random schedules that must notice a mutation of what a node decides."""

PARTS = ("src", "tests", "benchmarks", "samples", "docs", "tools", *FILES)


@dataclass(frozen=True)
class Mutation:
    """A change of one place that breaks a behaviour.

    Args:
        name: what is broken.
        file: path of the module, below ``src/azureml_elastic``.
        old: text that occurs once in the module.
        new: text in its place.
        tests: tests that must fail, below ``tests``.
        by_schedules: whether the random schedules of ``tests/support/schedules`` must fail, too.
        harmless: why they need not, which they do not.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...] = ()
    by_schedules: bool = False
    harmless: str = ""


SIMULATION = "unit/node/rendezvous/test_simulation.py"
RECOVERY = "runs/test_recovery.py"
MUTATIONS = (
    Mutation(
        "updates-follow-aborted-collectives",
        "train/session/step_checks.py",
        "if self._agent.wait_interrupted(0):",
        "if False:",
        ("unit/train/session/test_update_guard.py",),
    ),
    Mutation(
        "buffers-of-a-broken-broadcast",
        "train/session/step_checks.py",
        "if self._in_step:\n            self._device.copy",
        "if False:\n            self._device.copy",
        ("unit/train/session/test_update_guard.py",),
    ),
    Mutation(
        "heartbeats-ignored",
        "node/core/hub_state.py",
        "return beats.is_lost(last_received, now)",
        "return False",
        ("unit/node/core/test_hub_state.py",),
        by_schedules=True,
    ),
    Mutation(
        "names-for-incarnations",
        "node/core/hub_state.py",
        "here = self._members.keys() | self.watchers.waiting_members()",
        "here = self._members.keys() | self.watchers.nodes.keys()",
        ("unit/node/core/test_hub_state.py",),
    ),
    Mutation(
        "own-pause-forgotten",
        "node/core/pauses.py",
        "return self._paused_since(now - 2 * timeout) >= timeout - 2 * self._interval",
        "return False",
        ("unit/node/core/test_pauses.py",),
        by_schedules=True,
    ),
    Mutation(
        "pauses-taught-by-none",
        "node/core/pauses.py",
        "if self.pause < pause <= self.longest:",
        "if False:",
        ("unit/node/core/test_pauses.py",),
    ),
    Mutation(
        "given-up-by-what-is-known-since",
        "node/core/pauses.py",
        "return self._for(self._pause_before if recently else self.pause)",
        "return self._for(self.pause)",
        ("unit/node/core/test_pauses.py",),
    ),
    Mutation(
        "connection-for-life",
        "node/core/joiner.py",
        "return self._link is not None and self._link.answered",
        "return self._link is not None",
        ("integration/node/test_frozen_node.py",),
    ),
    Mutation(
        "two-seals",
        "node/rendezvous/rows.py",
        "return self._table.insert(key, stamped) if etag is None else self._table.replace(key, stamped, etag)",
        "row = self._table.get(key)\n"
        "                insert = self._table.insert\n"
        "                return self._table.replace(key, stamped, row.etag) if row else insert(key, stamped)",
        (SIMULATION,),
    ),
    Mutation(
        "no-take-over-delay",
        "node/core/sealing.py",
        "turn = self._ready_since + names.index(me) * self._takeover - now",
        "turn = self._ready_since - now",
        (SIMULATION,),
    ),
    Mutation(
        "older-round-commits",
        "node/table/checkpoint_pointer.py",
        'if row is not None and row.value["round"] > self._number:',
        'if row is not None and row.value["round"] > self._number + 1000:',
        ("unit/node/table/test_checkpoint_pointer.py",),
        by_schedules=True,
    ),
    Mutation(
        "cursor-off-by-one",
        "train/data/sampling.py",
        "return range(consumed, max(consumed, min(consumed + size, self.trained(consumed, size))))",
        "consumed += bool(consumed)\n"
        "        return range(consumed, max(consumed, min(consumed + size, self.trained(consumed, size))))",
        ("unit/train/data/test_sampling.py",),
    ),
    Mutation(
        "a-remainder-lost",
        "train/data/sampling.py",
        "return range(start, start + quotient + (rank < rest))",
        "return range(start, start + quotient)",
        ("unit/train/data/test_sampling.py",),
    ),
    Mutation(
        "weights-of-shares",
        "train/data/sampling.py",
        "return own * world_size / count",
        "return 1.0",
        ("unit/train/data/test_sampling.py",),
    ),
    Mutation(
        "same-order-each-epoch",
        "train/data/sampling.py",
        'f"{spec.seed}.{epoch}"',
        'f"{spec.seed}"',
        ("unit/train/data/test_sampling.py",),
    ),
    Mutation(
        "a-dying-agent-drops-its-state",
        "node/agent/agent.py",
        "held = self._channel.take_state() if self.machine.keeps_state else None",
        "held = None",
        ("runs/test_dying_agents.py",),
    ),
    Mutation(
        "another-step-than-the-furthest",
        "checkpoint/load/offers.py",
        "return whole, offer.step, offer.kind,",
        "return whole, -offer.step, offer.kind,",
        ("unit/checkpoint/test_offers.py",),
    ),
    Mutation(
        "an-incomplete-snapshot-chosen",
        "checkpoint/load/offers.py",
        "if len({each.part for each in copies}) >= copies[0].parts",
        "if copies",
        ("unit/checkpoint/test_offers.py",),
    ),
    Mutation(
        "an-older-state-adopted",
        "checkpoint/format/catalogue.py",
        "if name is None or name.step <= after:",
        "if name is None:",
        ("unit/checkpoint/snapshots/test_handed_over.py",),
    ),
    Mutation(
        "a-damaged-state-adopted",
        "checkpoint/load/selection.py",
        "if not verify(storage, each)",
        "if each.step",
        ("unit/checkpoint/snapshots/test_handed_over.py",),
    ),
    Mutation(
        "checksums-skipped",
        "checkpoint/load/selection.py",
        "return [each for each in found if each is not None]",
        "return [each for each in found if False]",
        ("integration/checkpoint/test_damage.py",),
    ),
    Mutation(
        "checkpoint-interval",
        "checkpoint/save/schedule.py",
        "return math.sqrt(2 * cost * between_losses)",
        "return math.sqrt(cost * between_losses)",
        ("unit/checkpoint",),
    ),
    Mutation(
        "a-secret-printed",
        "masking.py",
        "text = pattern.sub(rf",
        "pattern.sub(rf",
        ("unit/test_masking.py",),
    ),
    Mutation(
        "secret-inherited-by-workers",
        "node/agent/worker_group.py",
        "return frozenset() if needed else frozenset({table_variable})",
        "return frozenset()",
        ("unit/node/agent/test_worker_environment.py",),
    ),
    Mutation(
        "secret-of-the-early-start",
        "node/startup/preload.py",
        "withheld = {secret, variables.AZURE_STORAGE_CONNECTION_STRING}",
        "withheld: set[str] = set()",
        ("unit/node/startup/test_preload.py",),
    ),
    Mutation(
        "a-mount-unavailable",
        "node/diagnostics/checks/machine.py",
        'return Finding(name, "fail", f"{type(error).__name__}: {error}", limit, advice)',
        'return Finding(name, "ok", f"{type(error).__name__}: {error}", limit, advice)',
        ("unit/node", "integration/node/diagnostics"),
    ),
    Mutation(
        "restart-budget",
        "node/core/failures.py",
        "elif not free and charged > max_restarts:",
        "elif not free and charged > max_restarts + 1:",
        ("unit/node/core/test_failures.py",),
    ),
    Mutation(
        "same-error-restarted",
        "node/core/failures.py",
        "    if earlier is not None and not resized:\n",
        "    if earlier is not None and not conclusive:\n",
        ("unit/node/core/test_failures.py",),
    ),
    Mutation(
        "quarantine-ignored",
        "node/core/sealing.py",
        "return limits.quarantine is not None and member.strikes >= limits.quarantine",
        "return False",
        ("unit/node/rendezvous/test_quarantine.py",),
    ),
    Mutation(
        "hangs-never-found",
        "node/hangs/detector.py",
        "if waited <= limit:",
        "if waited <= limit * 1e9:",
        ("unit/node/hangs/test_detector.py",),
    ),
    Mutation(
        "notice-behind-a-hanging-call",
        "node/agent/agent_table.py",
        "        if threading.get_ident() != self._agent:\n            return call()\n",
        "        if self._agent:\n            return call()\n",
        ("integration/node/test_hanging_table.py",),
    ),
    Mutation(
        "notice-ignored",
        "node/agent/port.py",
        "        if not self._preemption.noticed:\n            return\n",
        "        return\n",
        ("runs/test_campaign.py",),
    ),
    Mutation(
        "end-of-the-store-ignored",
        "node/agent/port.py",
        "        if (end := store.end) is not None:\n",
        "        if (end := None) is not None:\n",
        (f"{RECOVERY}::test_a_killed_process_of_rank_0s_node_costs_no_step",),
    ),
    Mutation(
        "a-lost-node-explains-nothing",
        "node/core/training.py",
        "        if self._broken or self._leaves:\n",
        "        if self._leaves:\n",
        ("unit/node/core/test_training.py",),
    ),
    Mutation(
        "the-first-to-stop-ends-the-boundary",
        "node/core/boundary.py",
        "return self._members <= self._stopped.keys() and not all(",
        "return bool(self._stopped) and not all(",
        ("unit/node/core/test_step_boundary.py",),
        by_schedules=True,
    ),
    Mutation(
        "a-stopped-leaver-is-a-loss",
        "node/core/training.py",
        "return leavers if self._leader is None else leavers & self._leader.coordinator.stopped",
        "return frozenset()",
        ("unit/node/core/test_step_boundary.py",),
    ),
    Mutation(
        "who-has-finished-is-waited-for",
        "node/core/training.py",
        "if self._boundary.agreed and self.state in (State.STOPPED, State.DONE):",
        "if self._boundary.agreed and self.state is State.STOPPED:",
        ("unit/node/core/test_step_boundary.py",),
    ),
    Mutation(
        "a-client-without-the-key",
        "ipc/authentication.py",
        'if not hmac.compare_digest(proof, _proof(key, b"client", self._transcript)):',
        'if len(proof) != len(_proof(key, b"client", self._transcript)):',
        ("unit/ipc", "integration/node/attacks/test_hub.py"),
    ),
    Mutation(
        "lost-work-counted-as-training",
        "ledger/accounting.py",
        '            line.draw(min(time, steps.ended), "lost work", number, run.causes[number])',
        '            line.draw(min(time, steps.ended), "training", number)',
        ("unit/ledger",),
    ),
    Mutation(
        "replacement-budget",
        "node/replacement/policy.py",
        "(spent := cost(pools, jobs)) >= policy.budget:",
        "(spent := cost(pools, jobs)) >= 2 * policy.budget:",
        ("unit/node/replacement/test_policy.py",),
    ),
    Mutation(
        "output-without-its-prefix",
        "node/agent/worker_output.py",
        '"".join(f"{self._prefix}{line}\\n" for line in lines)',
        '"".join(f"{line}\\n" for line in lines)',
        ("unit/node/agent/test_worker_output.py",),
    ),
    # What a node decides, which random schedules of all nodes notice.
    Mutation(
        "seal-below-minimum",
        "node/core/sealing.py",
        "if len(inside) < self._limits.minimum or me not in names:",
        "if not inside or me not in names:",
        by_schedules=True,
    ),
    Mutation(
        "seal-waits-for-nobody",
        "node/core/sealing.py",
        "    return coming - excluded <= present\n",
        "    return True\n",
        by_schedules=True,
    ),
    Mutation(
        "seal-ignores-a-later-heartbeat",
        "node/core/joiner.py",
        "case ev.HeartbeatRead() if event.round >= self.round.number:",
        "case ev.HeartbeatRead() if False:",
        by_schedules=True,
    ),
    Mutation(
        "seal-blind-to-the-rows",
        "node/core/sealing.py",
        "all_are_here = {*self._round.expected} <= here | {me.node}",
        "all_are_here = True",
        by_schedules=True,
        harmless="who has written the round does without the rows for 0.1 s, and seals then only with all whom it "
        "expects, or with the maximum and all survivors: the rows would say the same.",
    ),
    Mutation(
        "go-by-one-yes",
        "node/core/boundary.py",
        "self.leaving = all(reply.ok for reply in replies)",
        "self.leaving = any(reply.ok for reply in replies)",
        by_schedules=True,
    ),
    Mutation(
        "free-to-go-unstopped",
        "node/core/training.py",
        "return leavers if self._leader is None else leavers & self._leader.coordinator.stopped",
        "return leavers",
        by_schedules=True,
    ),
    Mutation(
        "notice-for-ever",
        "node/core/boundary.py",
        "return self.notice is not None and now >= self.notice.until",
        "return False",
        by_schedules=True,
    ),
    Mutation(
        "silence-too-short",
        "node/core/pauses.py",
        "self.shortest = min(self.timeout, max(self.timeout / 3, _LOST_BEATS * self.tick))",
        "self.shortest = self.tick",
        by_schedules=True,
    ),
    Mutation(
        "charge-nothing",
        "node/core/failures.py",
        "charge=0 if free else 1",
        "charge=0",
        by_schedules=True,
    ),
    Mutation(
        "charge-one-too-few",
        "node/core/failures.py",
        "elif not free and charged > max_restarts:",
        "elif not free and charged >= max_restarts:",
        by_schedules=True,
    ),
    Mutation(
        "charge-at-once",
        "node/core/training.py",
        "self._until = self._now + (0.0 if killed else _SETTLE_SECONDS)",
        "self._until = self._now",
        by_schedules=True,
    ),
    Mutation(
        "charges-forgotten",
        "node/core/round.py",
        "failures=failures or aged(round_.failures, seconds),",
        "failures=failures,",
        by_schedules=True,
    ),
    Mutation(
        "strike-for-a-leaver",
        "node/core/round_ends.py",
        "return [member for member in gone if member.node not in leaving]",
        "return gone",
        by_schedules=True,
    ),
    Mutation(
        "spare-for-ever",
        "node/core/joiner.py",
        'return self._give_round_up("has stopped writing its heartbeat")',
        "pass",
        by_schedules=True,
    ),
    Mutation(
        "closing-by-rank-0-alone",
        "node/core/training.py",
        "(0.0 if self.leads else _CLOSING_SECONDS)",
        "(0.0 if self.leads else 1e9)",
        by_schedules=True,
    ),
    Mutation(
        "row-back-in-time",
        "node/core/joiner.py",
        "if has_gone_back(read.round, self.round):",
        "if False:",
        ("unit/node/core/test_joiner.py",),
        by_schedules=True,
        harmless="the candidate seals over the older row, which no other node may have changed. That a later round has "
        "run shows in the heartbeat, which it reads before; that this one has, in rank 0's next look at the row.",
    ),
    Mutation(
        "accepts-any-round",
        "node/core/round.py",
        "if (round_.number, round_.state) not in following:",
        "if False:",
        by_schedules=True,
        harmless="nodes send what the row has held, and what follows is a compare-and-swap with the row, or a read.",
    ),
    Mutation(
        "closed-is-no-loss",
        "node/core/hub_state.py",
        "return [*actions, *self._lose([peer.node])]",
        "return actions",
        by_schedules=True,
    ),
    Mutation(
        "absent-for-ever",
        "node/core/hub_state.py",
        "absent = sorted(self._names() - here) if is_late else []",
        "absent = []",
        by_schedules=True,
    ),
    Mutation(
        "done-is-lost",
        "node/core/hub_state.py",
        "lost = tuple(node for node in nodes if node not in self._lost | self._done)",
        "lost = tuple(node for node in nodes if node not in self._lost)",
        by_schedules=True,
    ),
    Mutation(
        "late-member-gets-no-proposal",
        "node/core/hub_state.py",
        "            self._early.append(message)\n",
        "            pass\n",
        by_schedules=True,
    ),
    Mutation(
        "all-done-by-one",
        "node/core/hub_state.py",
        "return self.to_members(messages.AllDone()) if self._names() <= self._done else []",
        "return self.to_members(messages.AllDone())",
        by_schedules=True,
    ),
)


def run_tests(copy: Path, tests: tuple[str, ...]) -> bool:
    """Run tests of the copy; return whether all of them pass."""
    paths = [f"tests/{test}" for test in tests]
    words = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-n", "2", *paths]
    environ = {**os.environ, "PYTHONPATH": str(copy / "src"), "CI": "true"}
    done = subprocess.run(words, cwd=copy, env=environ, capture_output=True, text=True, check=False)
    # 2: interrupted, as by -x with several processes.
    if done.returncode not in (0, 1) and not (done.returncode == 2 and "stopping after 1 failures" in done.stdout):  # noqa: PLR2004
        raise RuntimeError(
            f"pytest ended with exit code {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    return done.returncode == 0


def run_schedules(copy: Path) -> str:
    """Run random schedules of the copy; return what does not hold in the first one that fails, empty for nothing."""
    words = [sys.executable, "-m", "tests.support.schedules", "0", str(SCHEDULES - 1), "--quiet", "--first"]
    environ = {**os.environ, "PYTHONPATH": str(copy / "src")}
    done = subprocess.run(words, cwd=copy, env=environ, capture_output=True, text=True, check=False)
    if not done.returncode:
        return ""
    # A machine that raises has failed, too.
    return next(iter(done.stdout.splitlines()), "") or done.stderr.splitlines()[-1]


def judge(copy: Path, mutation: Mutation) -> tuple[bool, str]:
    """Return whether a mutation survives what shall notice it, and what the schedules say."""
    said = run_schedules(copy) if mutation.by_schedules else ""
    survives = mutation.by_schedules and not said and not mutation.harmless
    return survives or (bool(mutation.tests) and run_tests(copy, mutation.tests)), said


def main() -> int:
    """Apply the mutations and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutations to apply, by default all")
    parser.add_argument("--no-baseline", action="store_true", help="do not run the tests without a mutation first")
    parser.add_argument("--schedules", action="store_true", help="only what random schedules notice, and only by them")
    arguments = parser.parse_args()
    chosen = [each for each in MUTATIONS if not arguments.names or each.name in arguments.names]
    if arguments.schedules:
        chosen = [replace(each, tests=()) for each in chosen if each.by_schedules]
    survivors, said_by = [], list[str]()
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        copy = Path(folder)
        for part in PARTS:
            source = ROOT / part
            if source.is_dir():
                shutil.copytree(source, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy2(source, copy / part)
        if not arguments.no_baseline:
            tests = tuple(dict.fromkeys(test for each in chosen for test in each.tests))
            holds = not any(each.by_schedules for each in chosen) or not run_schedules(copy)
            if not holds or (tests and not run_tests(copy, tests)):
                print("The tests fail without any mutation.", file=sys.stderr)
                return 2
        for each in chosen:
            path = copy / "src" / "azureml_elastic" / each.file
            text = path.read_text()
            if text.count(each.old) != 1:
                raise ValueError(
                    f"{each.name}: the text to replace occurs {text.count(each.old)} times in {each.file}."
                )
            start = time.monotonic()
            path.write_text(text.replace(each.old, each.new))
            survives, said = judge(copy, each)
            path.write_text(text)
            survivors += [each.name] if survives else []
            said_by += [each.name] if said else []
            harmless = each.harmless and not said and not each.tests
            verdict = "SURVIVES" if survives else "harmless" if harmless else "noticed"
            print(f"{verdict:9} {each.name} ({time.monotonic() - start:.0f} s) {said[:200]}", flush=True)
    print(f"{len(survivors)} of {len(chosen)} mutations survive.")
    if by_schedules := [each for each in chosen if each.by_schedules]:
        print(f"Random schedules notice {len(said_by)} of {len(by_schedules)}.")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
