"""One run: `runs/<name>/<UTC time>-<4 hex>/`, its lock, and the record of each stage.

run.json          what was asked for, the run's fingerprint, how it ended
lock              held (flock) by the process that works on the run
stages/X.json     stage X is done: its inputs, where its output lies, the hash of every file
data/ ...         the output of a stage that this run made itself
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from stoker.core.errors import BusyError, DataError, Plain, UserError
from stoker.core.files import (
    alone,
    full_disk_is_named,
    publish_folder,
    read_json,
    scratch_folder,
    sha256_file,
    sweep,
    write_json,
)
from stoker.core.fingerprint import fingerprint

_RUN = "run.json"
_LOCK = "lock"
_STAGES = "stages"


@dataclass(frozen=True, kw_only=True, slots=True)
class StageRecord:
    """That a stage is done, from which inputs, and what it left."""

    stage: str
    """Name of the stage."""

    key: str
    """Fingerprint of its inputs other than data: code, settings, library versions, stages before."""

    columns: tuple[str, ...]
    """Raw columns that it read; empty for a stage that reads no data."""

    data: str
    """Fingerprint of those columns; "" where there are none."""

    output: str
    """Its output's folder, relative to the run's; it may lie in an earlier run."""

    files: dict[str, str]
    """File of the output -> SHA-256."""

    result: dict[str, Any]
    """A few facts for later stages and the summary, JSON values."""

    took_s: float
    """Wall time that it took, in the run that made it."""

    made_by: str
    """Id of the run that made the output."""

    content: str
    """Fingerprint of the part of its output that equal inputs do not settle (trained weights: a
    GPU, or a file that the user's code reads, can make others); "" where they settle it all."""

    @property
    def identity(self) -> str:
        """What a later stage depends on."""
        parts = {"stage": self.stage, "key": self.key, "data": self.data, "content": self.content}
        return fingerprint(parts)


class Run:
    """A run's folder."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def id(self) -> str:
        """The folder's name."""
        return self.root.name

    def about(self) -> dict[str, Any]:
        """What `run.json` says."""
        about: dict[str, Any] = read_json(self.root / _RUN)
        return about

    def finish(self, outcome: str) -> None:
        """Mark the run as ended; it is not continued any more."""
        write_json(self.root / _RUN, self.about() | {"finished": _now(), "outcome": outcome})

    def record(self, stage: str) -> StageRecord | None:
        """The record of a stage, or None where it is not done or its record is unreadable."""
        path = self.root / _STAGES / f"{stage}.json"
        if not path.exists():
            return None
        try:
            raw = read_json(path)
            return StageRecord(**(raw | {"columns": tuple(raw["columns"])}))
        except (DataError, TypeError, KeyError):
            return None

    def write_record(self, record: StageRecord) -> None:
        """Publish that a stage is done; its output must be on the disk already."""
        write_json(self.root / _STAGES / f"{record.stage}.json", asdict(record))

    def forget(self, stage: str, folder: str) -> None:
        """Remove a stage's record and the output that this run itself made for it."""
        (self.root / _STAGES / f"{stage}.json").unlink(missing_ok=True)
        shutil.rmtree(self.root / folder, ignore_errors=True)

    def output(self, record: StageRecord) -> Path:
        """Where a stage's output lies."""
        return Path(os.path.normpath(self.root / record.output))

    def sweep(self) -> None:
        """Remove what a killed process left half-made; call it under the lock."""
        sweep(self.root, "*")
        sweep(self.root / _STAGES, "*")


def damage(folder: Path, files: Mapping[str, str]) -> str | None:
    """What is wrong with a stage's output, or None where every file is as it was written."""
    for name, expected in files.items():
        path = folder / name
        if not path.is_file():
            return f"{path} is not there"
        if sha256_file(path) != expected:
            return f"{path} was changed or damaged"
    return None


def runs_newest_first(runs_root: Path) -> list[Run]:
    """Every run below `runs/<name>/`, the newest first."""
    if not runs_root.is_dir():
        return []
    found = sorted((p for p in runs_root.iterdir() if (p / _RUN).is_file()), reverse=True)
    return [Run(path) for path in found]


@contextmanager
def open_run(
    runs_root: Path, *, run_fingerprint: str, settings: Mapping[str, Any]
) -> Iterator[tuple[Run, bool]]:
    """Continue the newest unfinished run of equal fingerprint, or make a new one; hold its lock.

    Args:
        runs_root: `runs/<name>/`.
        run_fingerprint: Of settings, code and source.
        settings: Written to a new run's `run.json`.

    Yields:
        The run, and whether it is continued.

    Raises:
        BusyError: another process works on it; names its pid and host.
    """
    with ExitStack() as held:
        with _writable(runs_root), alone(runs_root / ".lock"):
            # Alone, so that two that start at once do not each make a run.
            sweep(runs_root, "*")
            found = _unfinished(runs_root, run_fingerprint)
            run = found or _new_run(runs_root, run_fingerprint, settings)
            held.enter_context(_locked(run))
        run.sweep()
        yield run, found is not None


def _unfinished(runs_root: Path, run_fingerprint: str) -> Run | None:
    for run in runs_newest_first(runs_root):
        try:
            about = run.about()
        except DataError:
            continue
        if about.get("fingerprint") == run_fingerprint and about.get("finished") is None:
            return run
    return None


def _new_run(runs_root: Path, run_fingerprint: str, settings: Mapping[str, Any]) -> Run:
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    final = runs_root / f"{stamp}-{secrets.token_hex(2)}"
    about = {
        "fingerprint": run_fingerprint,
        "started": _now(),
        "finished": None,
        "outcome": None,
        "settings": dict(settings),
    }
    # With its run.json or not at all: a folder without one would never be looked at again.
    with scratch_folder(final) as made:
        write_json(made / _RUN, about)
        publish_folder(made, final)
    return Run(final)


@contextmanager
def _writable(runs_root: Path) -> Iterator[None]:
    try:
        with full_disk_is_named(runs_root):
            yield
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
            raise
        raise UserError(
            f"the runs folder {runs_root} must be a folder that can be written",
            got=Plain(error.strerror or str(error)),
            fix="Write elsewhere with --set runs=DIR.",
        ) from None


@contextmanager
def _locked(run: Run) -> Iterator[None]:
    with full_disk_is_named(run.root), (run.root / _LOCK).open("a+", encoding="utf-8") as stream:
        try:
            # The kernel gives the lock back when its owner dies, however it dies.
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            stream.seek(0)
            raise BusyError(
                f"one process at a time works on run {run.id}",
                got=Plain(f"it is held by {stream.read().strip() or 'another process'}"),
                fix="Wait for it, or end it.",
            ) from None
        stream.truncate(0)
        stream.write(f"pid {os.getpid()} on {socket.gethostname()}\n")
        stream.flush()
        yield


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
