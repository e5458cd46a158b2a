"""Appends complete records to files such as `metrics.jsonl`, on a disk that may be full or missing."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from stoker.core.errors import Plain, UserError
from stoker.core.files import FullDisk, write_atomic
from stoker.core.incarnation import own_incarnation, require_newest
from stoker.telemetry.catalogue import training as catalogue

_LOG = logging.getLogger(__name__)


class DiskFailures:
    """Suppresses errors of the disk in `with` blocks; logs the first error, and when writing works again."""

    def __init__(self, what: str) -> None:
        """Create the object; no write has failed yet.

        Args:
            what: Name of the file for the log.
        """
        self._what = what
        self._lost = 0

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        """Suppress an error of the disk; any other error is raised."""
        if error is None:
            if self._lost:
                _LOG.warning("%s can be written again; %d writes were lost", self._what, self._lost)
            self._lost = 0
            return False
        if not isinstance(error, OSError | FullDisk):
            return False
        if not self._lost:
            _LOG.warning("%s cannot be written, training goes on: %s", self._what, error)
        self._lost += 1
        return True


class AppendedFile:
    """Appends records to a file; each record is either complete in the file or missing."""

    def __init__(self, path: Path) -> None:
        """Open or create a file to append to.

        Raises:
            UserError: the file cannot be opened.
        """
        self.path = path
        self._disk_failures = DiskFailures(str(path))
        self._file = -1
        self._size = 0
        self._open()

    def append(self, record: bytes) -> None:
        """Append a record; if the disk fails, only this record is lost.

        Raises:
            Superseded: a later start of this process's job has begun.
        """
        if self._file < 0:
            raise ValueError(f"{self.path} is closed")
        require_newest()
        with self._disk_failures:
            self._write_whole(record)

    def replace(self, content: bytes) -> None:
        """Replace the whole content atomically; after a failure, the file is unchanged.

        Raises:
            Superseded: a later start of this process's job has begun.
        """
        with self._disk_failures:
            # The new content is in a new file: a suspended earlier start of the job may have the old file open.
            write_atomic(self.path, content)
            os.close(self._file)
            self._open()

    def close(self) -> None:
        """Flush to the disk."""
        if self._file < 0:
            return
        with self._disk_failures:
            os.fsync(self._file)
        os.close(self._file)
        self._file = -1

    def _open(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            self._size = os.fstat(self._file).st_size
        except OSError as error:
            raise UserError(
                f"{self.path} must be a file that can be written",
                got=Plain(error.strerror or str(error)),
                fix="Write elsewhere with --set runs=DIR.",
            ) from error

    def _write_whole(self, record: bytes) -> None:
        rest = memoryview(record)
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError:
            # Remove the incomplete record: it would make all later records unreadable.
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._size)
            raise
        self._size += len(record)


_to_json = json.JSONEncoder(allow_nan=False).encode
"""Does the same as `json.dumps`, but without creating a new encoder for each line."""


_WHEN_TIME_ALLOWS = catalogue.GRADIENT_NORM.tensorboard
"""Name of a metric that is left out of the file. It is measured together with TensorBoard's histograms, whose steps
depend on how often a run was killed; the content of the file must not."""


class JsonLines:
    """Appends scalars to a file; each line is complete once `write` returns."""

    def __init__(self, path: Path) -> None:
        self._file = AppendedFile(path)

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Append one line; values that JSON cannot represent (NaN, infinity) are written as strings."""
        line = {"step": step} | {
            name: _json_number(value)
            for name, value in scalars.items()
            if name != _WHEN_TIME_ALLOWS
        }
        self._file.append(_to_json(line).encode() + b"\n")

    def rewind(self, step: int, *, validated: bool = True) -> None:
        """Remove the lines of later steps, and an incomplete line of a killed process.

        In a job, the file is always replaced, because an earlier start of the job may have the old file open.
        """
        lines = self._file.path.read_bytes().splitlines(keepends=True)
        kept = [line for line in lines if _is_up_to(line, step, validated=validated)]
        if len(kept) < len(lines) or own_incarnation() is not None:
            self._file.replace(b"".join(kept))

    def close(self) -> None:
        """Flush to the disk and close."""
        self._file.close()


def _is_up_to(line: bytes, step: int, *, validated: bool) -> bool:
    try:
        scalars = json.loads(line)
        # The line of an epoch follows the line of its last step, with the same step number.
        last = step if validated or catalogue.EPOCH.tensorboard not in scalars else step - 1
        return line.endswith(b"\n") and bool(scalars["step"] <= last)
    except (ValueError, KeyError, TypeError):
        return False


def _json_number(value: float) -> float | str:
    return float(value) if math.isfinite(value) else str(float(value))
