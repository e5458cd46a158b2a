"""A pytest plugin: the CPU time of each folder of tests, and its limit.

A folder may have a budget of minutes in `pyproject.toml`:

    [tool.stoker.test_minutes]
    "tests/unit/evaluate" = 1

The run fails if the folder's tests take more than `CPU_PER_MINUTE` CPU minutes for each of them.
"""

from __future__ import annotations

import contextlib
import os
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CPU_PER_MINUTE = 2.5
"""CPU minutes that a folder may take for each minute of its budget: `make test` uses up to 4 cores."""

COLLECTION = "(imports and collection)"


class CpuTime:
    """Adds up the CPU time of tests by folder: of this process and of its children, ended or running.

    So the child of a session's fixture counts for the folder whose test uses it, not for the last one.
    """

    def __init__(self, config: pytest.Config) -> None:
        """Args: config: of the controller or of one of xdist's workers."""
        self._config = config
        self._root = config.rootpath
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self) -> Iterator[None]:
        """Measure imports of test files."""
        before_s = _cpu_s()
        result = yield
        self._seconds[COLLECTION] += _cpu_s() - before_s
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Measure a test with the fixtures that it sets up and tears down."""
        before_s = _cpu_s()
        result = yield
        self._seconds[_folder(item, self._root)] += _cpu_s() - before_s
        return result

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Add what a worker of xdist has measured."""
        for folder, seconds in getattr(node, "workeroutput", {}).get("cpu_s", {}).items():
            self._seconds[folder] += seconds

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Send the times to the controller, or fail the run there if a folder exceeds its limit."""
        if hasattr(self._config, "workeroutput"):
            self._config.workeroutput["cpu_s"] = dict(self._seconds)
        elif self._excesses() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the folders, the most expensive first."""
        terminalreporter.section("CPU minutes by folder")
        for folder, seconds in sorted(self._seconds.items(), key=lambda each: -each[1]):
            terminalreporter.line(f"{seconds / 60:8.2f}  {folder}")
        terminalreporter.line(f"{sum(self._seconds.values()) / 60:8.2f}  total")
        for line in self._excesses():
            terminalreporter.line(line, red=True)

    def _excesses(self) -> list[str]:
        return [
            f"FAILED {folder}: {self._seconds[folder] / 60:.2f} CPU minutes; at most "
            f"{CPU_PER_MINUTE * minutes:g}, {CPU_PER_MINUTE:g} for each minute of its budget"
            for folder, minutes in _budgets(self._root).items()
            if self._seconds[folder] > 60 * CPU_PER_MINUTE * minutes
        ]


TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def _cpu_s() -> float:
    """CPU time so far of this process, of its children that have ended, and of running descendants."""
    times = os.times()
    ended = times.user + times.system + times.children_user + times.children_system
    return ended + sum(_running_s(child) for child in _children(os.getpid()))


def _running_s(pid: int) -> float:
    """CPU time of a process and its descendants; 0 if it has ended meanwhile: its parent has the time then."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return sum(map(int, fields[11:15])) / TICKS_PER_S + sum(map(_running_s, _children(pid)))


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            found += map(int, path.read_text().split())
    return found


def _folder(item: pytest.Item, root: Path) -> str:
    folder = item.path.parent
    return str(folder.relative_to(root)) if folder.is_relative_to(root) else str(folder)


def _budgets(root: Path) -> dict[str, float]:
    """Folder -> its budget, minutes."""
    path = root / "pyproject.toml"
    settings = tomllib.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    budgets: dict[str, float] = settings.get("tool", {}).get("stoker", {}).get("test_minutes", {})
    return budgets
