"""What a person sees while the chain works: a line a stage, and how far the current one is."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from stoker.app.chain import StageOutcome
from stoker.cli.goodput import goodput_line
from stoker.cli.stdout import tolerant
from stoker.telemetry.wall_time import TimeLeft, shown_time

PLAIN_EVERY_S = 10.0
"""Where the output is no terminal, a line of progress is printed when this has passed since the
last one, or"""

PLAIN_EVERY_SHARE = 0.1
"""when so much more is done, but no more often than"""

PLAIN_LEAST_S = 1.0
"""this."""


class ConsoleListener:
    """Writes to stderr, so that stdout holds results only."""

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
        self._said_s = self._said_share = 0.0
        self._left = TimeLeft()
        self._note = note

    def __enter__(self) -> Self:
        """Print the note; the bar is drawn when a stage begins."""
        if self._note:
            self.log(self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Take the bar off the screen, whatever happened."""
        self._bar.stop()

    def log(self, line: str) -> None:
        """A line that stays."""
        self.console.print(escape(line))

    def stage_began(self, stage: str) -> None:
        """Show a bar for this stage."""
        self._stage, self._left = stage, TimeLeft()
        self._said_s, self._said_share = time.monotonic(), 0.0
        if not self.console.is_terminal:
            self.log(f"  {stage:<10} ...")
            return
        self._bar.start()
        self._task = self._bar.add_task("", total=None, stage=stage)

    def progress(self, line: str, share: float | None) -> None:
        """Move the bar; elsewhere a line now and then."""
        left_s = None if share is None else self._left.seconds(share)
        shown = line if not left_s else f"{line}, {shown_time(left_s)} left"
        if self._task is not None:
            total = None if share is None else 1.0
            self._bar.update(self._task, description=shown, completed=share or 0.0, total=total)
        elif self._is_time(share or 0.0):
            self._said_s, self._said_share = time.monotonic(), share or 0.0
            percent = "" if share is None else f"{share:4.0%}  "
            self.log(f"  {self._stage:<10} {percent}{shown}")

    def _is_time(self, share: float) -> bool:
        passed_s = time.monotonic() - self._said_s
        further = abs(share - self._said_share) >= PLAIN_EVERY_SHARE
        return passed_s > PLAIN_EVERY_S or (further and passed_s > PLAIN_LEAST_S)

    def stage_ended(self, outcome: StageOutcome) -> None:
        """Replace the bar by one line."""
        if self._task is not None:
            self._bar.remove_task(self._task)
            self._bar.stop()
            self._task = None
        mark = "-" if outcome.skipped else "+"
        note = f"skipped: {outcome.why or 'nothing to do'}" if outcome.skipped else outcome.why
        self.log(f"{mark} {outcome.stage:<10} {outcome.took_s:6.1f} s  {note}".rstrip())
        for line in _worth_saying(outcome):
            self.log(f"  {line}")


def _worth_saying(outcome: StageOutcome) -> list[str]:
    """What nobody should have to look up: what was left out, and what was lost on purpose."""
    facts = outcome.result
    if outcome.stage == "train" and not outcome.skipped:
        line = goodput_line(facts)
        return [] if line is None else [f"goodput {line}"]
    if outcome.stage != "ingest":
        return []
    left_out = {"bad rows": facts.get("bad_rows"), "copies": facts.get("copies_dropped")}
    lines = [f"{count:,} {what} left out" for what, count in left_out.items() if count]
    return lines + ([f"images: {facts['image_store']}"] if facts.get("image_store") else [])
