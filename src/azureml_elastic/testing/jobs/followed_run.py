"""A run of the local workspace as it is shown while it runs, and the folder of files that it leaves."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from azureml_elastic.ledger.events import Event
from azureml_elastic.ledger.picture import Picture
from azureml_elastic.ledger.reading import EventReader, LineReader, NodeNames
from azureml_elastic.ledger.summary import FaultRecord, Paths, Report, report_of
from azureml_elastic.local.view import View, state_of_job
from azureml_elastic.testing.jobs.machines import Evicted
from azureml_elastic.testing.jobs.nodes import LEDGER, Setting
from azureml_elastic.testing.jobs.runs import Run, Runs, unlike_the_run
from azureml_elastic.testing.storage import ARTIFACTS, Location, locate


class FollowedRun:
    """Reader of the events and logs of a run's nodes.

    Args:
        runs: records of the workspace, all of whose jobs belong to the run.
        first: name of the job that was submitted.
    """

    def __init__(self, setting: Setting, runs: Runs, first: str, paths: Paths, view: View) -> None:
        self._setting = setting
        self._runs = runs
        self._first = first
        self._paths = paths
        self._view = view
        self._names = NodeNames(self._label_of)
        self._readers: dict[Path, EventReader] = {}
        self._logs: dict[Path, LineReader] = {}
        self._events: list[Event] = []
        self._picture = Picture()
        self._evictions = 0

    @property
    def over(self) -> bool:
        """Whether all jobs have ended; only a running node submits further ones."""
        return all(run.over.is_set() for run in self._runs.all())

    def update(self, evicted: Sequence[Evicted]) -> None:
        """Read what is new, and show it."""
        for eviction in evicted[self._evictions :]:
            notice = eviction.eviction.notice.total_seconds()
            when = f"with a notice of {notice:g} s" if notice else "without notice"
            self._view.note(f"{self._label_of(eviction.job)} is evicted {when} at step {eviction.step}")
        self._evictions = len(evicted)
        found: list[Event] = []
        for ledger in self._setting.ledgers():
            found += self._readers.setdefault(ledger, EventReader(ledger / "events")).read()
        fresh = sorted(self._names.apply(found), key=lambda event: event.time)  # one machine, one clock
        self._events += fresh
        self._picture.apply(fresh)
        for run in self._commands():
            self._picture.expect(self._label_of(run.name), state_of_job(run.status))
            over = run.over.is_set()  # before the read: all is written by then
            # Copies, as the job's thread adds logs meanwhile.
            for name, files in list(run.logs.items()):
                for path in list(files):
                    lines = self._logs.setdefault(path, LineReader(path)).read(last=over)
                    if lines:
                        self._view.output(self._label(run, name), [line.decode("utf-8", "replace") for line in lines])
        self._view.events(self._picture.now, fresh)

    def save(self, evicted: Sequence[Evicted], *, interrupted: bool) -> Report:
        """Write events, samples, logs, outputs and the report of the run to its folder."""
        for event in self._events:
            with (self._paths.events / f"{event.node}.jsonl").open("a", encoding="utf-8") as file:
                file.write(event.model_dump_json() + "\n")
        for ledger in self._setting.ledgers():
            if (ledger / "samples").is_dir():
                shutil.copytree(ledger / "samples", self._paths.samples, dirs_exist_ok=True)
        for run in self._commands():
            for name in run.logs:
                (self._paths.logs / f"{self._label(run, name)}.log").write_bytes(run.log(name))
        self._save_outputs()
        report = self._report(evicted, interrupted=interrupted)
        report.write()
        return report

    def _save_outputs(self) -> None:
        jobs: dict[tuple[str, str], list[Run]] = {}
        for run in self._commands():
            for name, (_, uri) in run.outputs.items():
                jobs.setdefault((name, uri), []).append(run)
        outputs = self._paths.run_dir / "outputs"
        for (name, uri), users in jobs.items():
            owner = outputs if len(users) > 1 or len(self._commands()) == 1 else outputs / self._label_of(users[0].name)
            target = self._paths.checkpoints if name == "azureml_elastic_checkpoints" else owner / name
            self._setting.mirror.copy(locate(uri, lambda _: None), target)
        for run in self._commands():
            folder = outputs / self._label_of(run.name)
            written = Location(ARTIFACTS, f"ExperimentRun/dcid.{run.name}") / "outputs"
            self._setting.mirror.copy(written, folder)
            # Events and samples have folders of their own.
            shutil.rmtree(folder / LEDGER.name, ignore_errors=True)
            if not any(folder.iterdir()):
                folder.rmdir()

    def _report(self, evicted: Sequence[Evicted], *, interrupted: bool) -> Report:
        report = report_of(self._paths, self._picture, skipped=sum(one.skipped for one in self._readers.values()))
        faults = tuple(
            FaultRecord(fault=str(each.eviction), nodes=(self._label_of(each.job),), step=each.step, time=each.time)
            for each in evicted
        )
        gone = {self._label_of(each.job): each.eviction for each in evicted}
        nodes = tuple(
            node.model_copy(update={"ending": "preempted" if gone[node.name].notice else "killed"})
            if node.name in gone
            else node
            for node in report.nodes
        )
        changes: dict[str, object] = {"run_id": self._first, "faults": faults, "nodes": nodes}
        if report.outcome == "unfinished":
            changes |= {"outcome": "interrupted" if interrupted else "failed", "message": self._failure(interrupted)}
        elif not interrupted:
            changes |= self._end_of_commands(report)
        # With a notice the node leaves before its machine is lost.
        losses = [(self._label_of(each.job), each.time) for each in evicted if not each.eviction.notice]
        return report.model_copy(update=changes).with_timeline(self._picture, losses)

    def _end_of_commands(self, report: Report) -> dict[str, object]:
        runs = self._commands()
        state = unlike_the_run([run.status for run in runs], succeeded=report.outcome == "succeeded")
        if state == "Completed":
            why = "The command ended with 0 all the same, so that Azure ML calls the job completed."
            return {"exit_code": 0, "message": f"{report.message} {why}".strip()}
        failed = next((run for run in runs if run.exit_code), None)
        if state is None or failed is None:
            return {}
        log = self._paths.logs / f"{self._label(failed, next(iter(failed.logs)))}.log"
        return {
            "outcome": "failed",
            "exit_code": failed.exit_code,
            "message": f"The program succeeded, but the command on {self._label_of(failed.name)} ended with "
            f"{failed.exit_code}, so that Azure ML calls the job failed; its output is in {log}.",
        }

    def _failure(self, interrupted: bool) -> str:
        if interrupted:
            return f"The run was interrupted at step {self._picture.now.step or 0}."
        messages = [f"{self._label_of(run.name)}: {run.error[1]}" for run in self._commands() if run.error is not None]
        return messages[0] if messages else "All jobs have ended, and no node has recorded the end of the run."

    def _commands(self) -> list[Run]:
        return [command for run in self._runs.all() for command in self._runs.commands(run)]

    def _label_of(self, job: str) -> str:
        """Return the name of a node by its job: that of the step, as ``status`` shows it."""
        run = self._runs.find(job)
        if run.parent is not None:
            return ".".join(run.path)
        return "job" if run.name == self._first else run.name.removeprefix(f"{self._first}-")

    def _label(self, run: Run, log: str) -> str:
        """Return the name of a log: that of the node, with the number of the process in a job of several."""
        number = Path(log).stem.partition("_process_")[2]
        return f"{self._label_of(run.name)}-{number}" if number else self._label_of(run.name)
