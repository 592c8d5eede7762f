"""A run as it goes, from its records: in a live view on a terminal, line by line elsewhere."""

from __future__ import annotations

import collections
import json
import statistics
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from slime_hpc.display import rounds_table
from slime_hpc.driver.record import round_line
from slime_hpc.facts import read_records
from slime_hpc.records import read_heartbeat
from slime_hpc.run_dir import RunDir
from slime_hpc.slurm.commands import Slurm
from slime_hpc.spec.values import format_time
from slime_hpc.status import StatusReport, load_status

POLL_S = 0.5
ASK_WHILE_PENDING_S = 10.0
ASK_WHILE_RUNNING_S = 30.0
"""Slurm is asked rarely: that a run begins and ends is seen by its files."""
ASK_WHILE_ENDING_S = 3.0
SETTLES_S = 60.0
"""For Slurm to make up its mind about a job whose supervisor has ended: over, or back into the queue."""
_ENDING = ("RUNNING", "COMPLETING", "PREEMPTED", "REQUEUED")
BACKLOG = 12
"""Lines of the past to begin with, and rounds that a live view shows."""
LIVE_LINES = 6
MEASURED_ROUNDS = 20
Row = dict[str, Any]


@dataclass(frozen=True)
class News:
    """One thing that has happened."""

    line: str
    is_round: bool
    """A trained round, whose metrics a table may show instead."""


@dataclass(frozen=True)
class View:
    """What there is to show at one moment."""

    headline: str
    waiting: str
    """Why nothing goes on, if so: the queue's reason, a driver that is silent."""
    news: Sequence[News]
    """What was not in an earlier view."""
    rounds: Sequence[Row]
    """The last ones' metrics, oldest first."""


class Screen(AbstractContextManager["Screen"], Protocol):
    """Where views are shown."""

    def show(self, view: View) -> None: ...


class PlainScreen:
    """Every piece of news as a line: for files, pipes and dumb terminals."""

    def __init__(self) -> None:
        self._waiting = ""

    def show(self, view: View) -> None:
        if view.waiting not in ("", self._waiting):
            print(stamped(time.time(), view.waiting), flush=True)
        self._waiting = view.waiting
        for news in view.news:
            print(news.line, flush=True)

    def __enter__(self) -> PlainScreen:
        return self

    def __exit__(self, *exception: object) -> None:
        pass


class LiveScreen:
    """One picture that is drawn anew: how it stands, the last rounds, the last news."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, refresh_per_second=4)
        self._lines: collections.deque[str] = collections.deque(maxlen=LIVE_LINES)

    def show(self, view: View) -> None:
        self._lines.extend(news.line for news in view.news if not news.is_round)
        lines: list[RenderableType] = [Text(line, overflow="ellipsis", no_wrap=True) for line in self._lines]
        headline = Text(view.headline, style="bold")
        if view.waiting:
            headline = Text.assemble((view.headline, "bold"), "  ", (view.waiting, "yellow"))
        table: list[RenderableType] = ["", rounds_table(view.rounds)] if view.rounds else []
        self._live.update(Group(*lines, *table, "", headline))

    def __enter__(self) -> LiveScreen:
        self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._live.stop()


def choose_screen() -> Screen:
    """A live view where standard output is a terminal that can show one."""
    console = Console(highlight=False)
    return LiveScreen(console) if console.is_terminal and not console.is_dumb_terminal else PlainScreen()


def watch(run: RunDir, slurm: Slurm, screen: Screen) -> StatusReport:
    """Show a submitted run until it has ended. KeyboardInterrupt leaves it as it is."""
    watcher = Watcher(run, screen)
    seen_ended: set[Path] = set()
    report, asked = load_status(run, slurm), time.monotonic()
    settled_by = asked + SETTLES_S
    with screen:
        while True:
            news = watcher.look("" if report.verdict in ("ok", "finished") else report.why)
            if report.state == "ended":
                if not _may_come_back(report) or time.monotonic() > settled_by:
                    return report
                time.sleep(ASK_WHILE_ENDING_S)
                report, asked = load_status(run, slurm), time.monotonic()
                continue
            settled_by = time.monotonic() + SETTLES_S
            time.sleep(POLL_S)
            ended = {attempt.ended for attempt in run.all_attempts() if attempt.ended.exists()} - seen_ended
            pending = report.state == "pending"
            patience = ASK_WHILE_PENDING_S if pending or seen_ended else ASK_WHILE_RUNNING_S
            if ended or (pending and news) or time.monotonic() - asked > patience:
                report, asked = load_status(run, slurm), time.monotonic()
                seen_ended |= ended


def _may_come_back(report: StatusReport) -> bool:
    """Whether Slurm still holds the job of an attempt that did not end as its user wanted: it may requeue it."""
    state = report.attempts[-1].state
    return report.verdict not in ("finished", "cancelled", "stopped") and state in _ENDING


@contextmanager
def watch_beside(run: RunDir, screen: Screen) -> Iterator[None]:
    """Show, from a thread, the run that the block supervises."""
    over = threading.Event()
    watcher = Watcher(run, screen)

    def look_on() -> None:
        with screen:
            while not over.wait(POLL_S):
                watcher.look("")
            watcher.look("")

    thread = threading.Thread(target=look_on, name="watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


class Watcher:
    """Reads what is new in a run directory and puts it on a screen."""

    def __init__(self, run: RunDir, screen: Screen) -> None:
        plan = read_records(run).plan
        self._run = run
        self._screen = screen
        self._name = plan.spec.name
        self._num_rollout = plan.spec.num_rollout
        self._tails: dict[Path, Tail] = {}
        self._rounds: collections.deque[Row] = collections.deque(maxlen=MEASURED_ROUNDS)
        self._is_first_look = True

    def look(self, waiting: str) -> bool:
        """Show how it stands now; whether there was news."""
        rows = self._new_rows()
        self._rounds.extend(row for row in rows if "event" not in row)
        news = [item for row in rows if (item := self._news(row)) is not None]
        if self._is_first_look:
            news = news[-BACKLOG:]
        self._is_first_look = False
        self._screen.show(View(self._headline(), waiting, news, list(self._rounds)[-BACKLOG:]))
        return bool(rows)

    def _new_rows(self) -> list[Row]:
        rows = []
        for path in (self._run.metrics, *self._run.all_events()):
            rows += self._tails.setdefault(path, Tail(path)).rows()
        return sorted(rows, key=lambda row: float(row.get("time") or 0))

    def _news(self, row: Row) -> News | None:
        if "event" in row:
            text = event_text(row)
            return None if text is None else News(stamped(row.get("time") or 0, text), is_round=False)
        done = [r for r in self._rounds if r["round"] <= row["round"]]
        left = remaining_s(done, self._num_rollout)
        eta = "" if left is None else f"  left {format_time(round(left))}"
        line = stamped(row.get("time") or 0, round_line(row, self._num_rollout) + eta)
        return News(line, is_round=True)

    def _headline(self) -> str:
        parts = [self._name]
        beat = read_heartbeat(self._run.heartbeat)
        if beat is not None and beat["attempt"] == self._run.all_attempts()[-1].number:
            parts.append(f"round {beat['round']} of 0-{self._num_rollout - 1}: {beat['phase']}")
        if (left := remaining_s(self._rounds, self._num_rollout)) is not None:
            parts.append(f"about {format_time(round(left))} left")
        return "  ".join(parts)


class Tail:
    """A JSONL file that grows: its rows, each once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0

    def rows(self) -> list[Row]:
        """Whole rows that were added since the last call."""
        if not self._path.exists():
            return []
        with open(self._path, "rb") as file:
            file.seek(self._position)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._position += len(whole)
        return list(_parse_lines(whole))


def _parse_lines(text: bytes) -> Iterator[Row]:
    for line in text.splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue  # its writer was killed in the middle of it, and another closed it
        if isinstance(row, dict) and ("event" in row or "round" in row):
            yield row


def stamped(time_s: float, text: str) -> str:
    """As the driver's log has it."""
    return f"[{time.strftime('%H:%M:%S', time.localtime(time_s))}] {text}"


def remaining_s(rounds: Sequence[Mapping[str, Any]], num_rollout: int) -> float | None:
    """Seconds the rounds after these will take, by the median of what the last ones took."""
    seconds = [float(row["perf/step_time"]) for row in rounds if row.get("perf/step_time") is not None]
    if not seconds:
        return None
    rounds_left = num_rollout - 1 - int(rounds[-1]["round"])
    return rounds_left * statistics.median(seconds)


def event_text(row: Mapping[str, Any]) -> str | None:
    """What an event means to who watches; None where it means nothing."""
    form = _EVENTS.get(row["event"])
    if form is None:
        return None
    lists = {name: _listed(value) for name, value in row.items() if isinstance(value, list | dict)}
    return form.format_map(_Shown({**row, **lists}))


def _listed(value: Sequence[Any] | Mapping[str, Any]) -> str:
    if isinstance(value, Mapping):
        return "; ".join(f"{name} {_listed(item)}" for name, item in value.items())
    return ", ".join(map(str, value))


class _Shown(dict[str, Any]):
    """An event's fields; one that an older version did not write is shown as ``?``."""

    def __missing__(self, key: str) -> _Unknown:
        return _Unknown()


class _Unknown:
    def __format__(self, spec: str) -> str:
        return "?"


_EVENTS = {
    "started": "attempt {attempt} starts on {nodes}",
    "ray_start_failed": "Ray did not start on {who}, try {number} of {of}: {detail}",
    "raylet_up": "{who}: Ray is up",
    "driver_started": "the driver runs on {node}",
    "prompts_loaded": "{set}: {prompts} prompts; {too_long} left out as too long",
    "trainer_ready": "trainer is ready: {ranks} rank(s)",
    "engine_started": "{engine} is loading on {node}",
    "engine_healthy": "{engine} is healthy",
    "evaluated": "{set} after {rounds} rounds: reward {reward:.3f} of {samples} samples",
    "engine_dropped": "{engine} is lost, {left} left: {detail}",
    "unverified": "{of} samples, of which some could not be verified: {samples}",
    "notice": "{who} got {signal}",
    "raylet_died": "{detail}",
    "raylet_failed": "{detail}",
    "stop_timed_out": "still running {timeout_s:.0f} s after they were told to stop: {steps}",
}
"""Texts of events, by name."""
