"""What a person sees while the chain works: a line a stage, and how far the current one is."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from stoker.app.chain import StageOutcome

PLAIN_EVERY_S = 10.0
"""Where the output is no terminal, a line of progress is printed no more often than this."""


class ConsoleListener:
    """Writes to stderr, so that stdout holds results only."""

    def __init__(self) -> None:
        self.console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._bar = Progress(
            TextColumn("  {task.fields[stage]:<10}"),
            BarColumn(bar_width=24),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.description}"),
            console=self.console,
            transient=True,
        )
        self._task: TaskID | None = None
        self._stage = ""
        self._began_s = self._said_s = 0.0

    def __enter__(self) -> Self:
        """Nothing is drawn before a stage begins."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Take the bar off the screen, whatever happened."""
        self._bar.stop()

    def say(self, line: str) -> None:
        """A line that stays."""
        self.console.print(escape(line))

    def stage_began(self, stage: str) -> None:
        """Show a bar for this stage."""
        self._stage, self._began_s = stage, time.monotonic()
        self._said_s = self._began_s
        if not self.console.is_terminal:
            self.say(f"  {stage:<10} ...")
            return
        self._bar.start()
        self._task = self._bar.add_task("", total=None, stage=stage)

    def progress(self, line: str, share: float | None) -> None:
        """Move the bar; elsewhere a line now and then."""
        if self._task is not None:
            total = None if share is None else 1.0
            self._bar.update(self._task, description=line, completed=share or 0.0, total=total)
        elif time.monotonic() - self._said_s > PLAIN_EVERY_S:
            self._said_s = time.monotonic()
            percent = "" if share is None else f"{share:4.0%}  "
            self.say(f"  {self._stage:<10} {percent}{line}{self._left(share)}")

    def _left(self, share: float | None) -> str:
        """About how long it still takes, by what it took so far."""
        if not share:
            return ""
        left_s = round((time.monotonic() - self._began_s) * (1 - share) / share)
        return f", {left_s // 60}:{left_s % 60:02d} left"

    def stage_ended(self, outcome: StageOutcome) -> None:
        """Replace the bar by one line."""
        if self._task is not None:
            self._bar.remove_task(self._task)
            self._bar.stop()
            self._task = None
        mark = "-" if outcome.skipped else "+"
        note = f"skipped: {outcome.why or 'nothing to do'}" if outcome.skipped else outcome.why
        self.say(f"{mark} {outcome.stage:<10} {outcome.took_s:6.1f} s  {note}".rstrip())
        for line in _worth_saying(outcome):
            self.say(f"  {line}")


def _worth_saying(outcome: StageOutcome) -> list[str]:
    """What nobody should have to look up: what was left out, and what was lost on purpose."""
    facts = outcome.result
    if outcome.stage != "ingest":
        return []
    lines = [f"{facts['bad_rows']:,} bad rows left out"] if facts.get("bad_rows") else []
    return lines + ([f"images: {facts['image_store']}"] if facts.get("image_store") else [])
