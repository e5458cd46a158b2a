"""Progress of the chain on the console: one line per finished stage, and a bar for the current stage."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from stoker.app.chain import StageOutcome, results_by_stage
from stoker.cli.output import tolerant
from stoker.telemetry.run_time import seconds_of_run
from stoker.telemetry.wall_time import TimeLeft, goodput, largest_other, shown_time

PLAIN_EVERY_S = 10.0
"""Interval between progress lines if the output is not a terminal, seconds."""

PLAIN_EVERY_SHARE = 0.1
"""A line is printed before the interval ends if this share of the stage was done since the last line."""

MIN_PLAIN_S = 1.0
"""Minimum interval between progress lines, seconds."""


class _Warnings(logging.Handler):
    """Prints log records as lines on the console, without the module's name."""

    def __init__(self, log: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._log(f"  {self.format(record)}")
        except Exception:  # noqa: BLE001 - as every handler of the standard library does
            self.handleError(record)


class ConsoleListener:
    """Shows the progress of stages on stderr, so that stdout holds results only."""

    def __init__(self, note: str = "") -> None:
        """Create the console; `note` is printed first, unless it is empty."""
        # A closed pipe or a full disk must not stop the work.
        self.console = Console(file=tolerant(sys.stderr), highlight=False, soft_wrap=True)
        self._bar = Progress(
            TextColumn("  {task.fields[stage]:<10}"),
            BarColumn(bar_width=24),
            TextColumn("{task.percentage:>3.0f} %"),
            TextColumn("{task.description}", markup=False),
            console=self.console,
            transient=True,
        )
        self._task: TaskID | None = None
        self._stage = ""
        self._logged_s = self._logged_share = 0.0
        self._left = TimeLeft()
        self._note = note
        self._warnings = _Warnings(self.log)

    def __enter__(self) -> Self:
        """Print the note; print log records from now on if no other handler is installed."""
        if not logging.getLogger().handlers:
            logging.getLogger().addHandler(self._warnings)
        if self._note:
            self.log(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the bar."""
        logging.getLogger().removeHandler(self._warnings)
        self._bar.stop()

    def log(self, line: str) -> None:
        """Print a line."""
        self.console.print(escape(line))

    def stage_began(self, stage: str) -> None:
        """Show a bar for this stage, or a line if the output is not a terminal."""
        self._stage, self._left = stage, TimeLeft()
        self._logged_s, self._logged_share = time.monotonic(), 0.0
        if not self.console.is_terminal:
            self.log(f"  {stage:<10} ...")
            return
        self._bar.start()
        self._task = self._bar.add_task("", total=None, stage=stage)

    def progress(self, line: str, share: float | None) -> None:
        """Move the bar, or print a line from time to time."""
        left_s = None if share is None else self._left.seconds(share)
        shown = line if not left_s else f"{line}, {shown_time(left_s)} left"
        if self._task is not None:
            total = None if share is None else 1.0
            self._bar.update(self._task, description=shown, completed=share or 0.0, total=total)
        elif self._is_due(share or 0.0):
            self._logged_s, self._logged_share = time.monotonic(), share or 0.0
            percent = "" if share is None else f"{share:4.0%}  "
            self.log(f"  {self._stage:<10} {percent}{shown}")

    def _is_due(self, share: float) -> bool:
        passed_s = time.monotonic() - self._logged_s
        further = abs(share - self._logged_share) >= PLAIN_EVERY_SHARE
        return passed_s > PLAIN_EVERY_S or (further and passed_s > MIN_PLAIN_S)

    def stage_ended(self, outcome: StageOutcome) -> None:
        """Replace the bar with a line."""
        if self._task is not None:
            self._bar.remove_task(self._task)
            self._bar.stop()
            self._task = None
        mark = "-" if outcome.skipped else "+"
        note = f"skipped: {outcome.why or 'nothing to do'}" if outcome.skipped else outcome.why
        self.log(f"{mark} {outcome.stage:<10} {outcome.took_s:6.1f} s  {note}".rstrip())
        for line in _notes(outcome):
            self.log(f"  {line}")


def _notes(outcome: StageOutcome) -> list[str]:
    """Return notes to print below a stage: goodput, omitted rows, the store of decoded images."""
    results = results_by_stage([outcome])
    if "train" in results and not outcome.skipped:
        line = goodput_line(results["train"])
        return [] if line is None else [f"goodput {line}"]
    if "ingest" not in results:
        return []
    ingest = results["ingest"]
    left_out = {"bad row": ingest["bad_rows"], "copied row": ingest.get("copies_dropped")}
    lines = [f"{counted(count, what)} left out" for what, count in left_out.items() if count]
    store = ingest.get("image_store")
    return lines + ([f"images: {store}"] if store else [])


def counted(count: int, what: str) -> str:
    """Return a number with its noun: `1 row`, `2,000 rows`."""
    return f"{count:,} {what}{'s' * (count != 1)}"


MINUTE_S = 60.0


def goodput_line(train: Mapping[str, Any]) -> str | None:
    """Return the share of time spent in steps, and the largest other part with advice on reducing it.

    Args:
        train: The facts of the stage `train`.

    Returns:
        E.g. `41 % of 25.3 s was steps; most of the rest: imports and start, 6.1 s (...)`; None if
        nothing was measured (parameter servers, or a run of an earlier Stoker).
    """
    if train.get("goodput") is None or "wall_time" not in train:
        return None
    parts = seconds_of_run(train["wall_time"])
    share = goodput(parts)
    if share is None:
        return None
    other, total_s = largest_other(parts), sum(parts.values()) - parts["other_stages"]
    return (
        f"{share:.0%} of {_shown(total_s)} was steps; most of the rest: {other.label}, "
        f"{_shown(parts[other.name])} ({other.advice})"
    )


def _shown(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < MINUTE_S else shown_time(seconds)
