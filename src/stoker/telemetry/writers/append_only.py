"""Files that grow by complete records, on a disk that may be full or missing, such as `metrics.jsonl`."""

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
    """Suppresses errors of the disk in a `with` block; logs the first of several, and their end."""

    def __init__(self, what: str) -> None:
        """Start without a failure.

        Args:
            what: Name of the file in the log.
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
        """Suppress errors of the disk only."""
        if error is None:
            if self._lost:
                _LOG.warning("%s is written again; %d were lost", self._what, self._lost)
            self._lost = 0
            return False
        if not isinstance(error, OSError | FullDisk):
            return False
        if not self._lost:
            _LOG.warning("%s cannot be written, training goes on: %s", self._what, error)
        self._lost += 1
        return True


class AppendedFile:
    """Appends records; each is either complete in the file, or missing."""

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
        """Append a record; a failure of the disk loses only this one.

        Raises:
            Superseded: a later start of this process's job has begun.
        """
        if self._file < 0:
            raise ValueError(f"{self.path} is closed")
        require_newest()
        with self._disk_failures:
            self._write_whole(record)

    def replace(self, content: bytes) -> None:
        """Replace the whole content atomically; a failure leaves the file as it is.

        Raises:
            Superseded: a later start of this process's job has begun.
        """
        with self._disk_failures:
            # Its temporary file has a name of its own: an earlier start that wakes up must not have it open.
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
            # Half a record would corrupt all later ones.
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._size)
            raise
        self._size += len(record)


_to_json = json.JSONEncoder(allow_nan=False).encode
"""Like `json.dumps`, which creates an encoder for each line."""


_WHEN_TIME_ALLOWS = catalogue.GRADIENT_NORM.tensorboard
"""Written together with TensorBoard's histograms. It is left out, so that the file does not depend on how often a run was killed."""


class JsonLines:
    """Appends scalars to a file; each line is complete once `write` returns."""

    def __init__(self, path: Path) -> None:
        self._file = AppendedFile(path)

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Append one line; values that JSON cannot represent (NaN, infinity) are written as text."""
        line = {"step": step} | {
            name: _json_number(value)
            for name, value in scalars.items()
            if name != _WHEN_TIME_ALLOWS
        }
        self._file.append(_to_json(line).encode() + b"\n")

    def rewind(self, step: int, *, validated: bool = True) -> None:
        """Drop the lines of later steps, and an incomplete line of a killed writer.

        In a job, the file is always replaced, because an earlier start may have the old one open.
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
        # An epoch's line follows that of its last step.
        last = step if validated or catalogue.EPOCH.tensorboard not in scalars else step - 1
        return line.endswith(b"\n") and bool(scalars["step"] <= last)
    except (ValueError, KeyError, TypeError):
        return False


def _json_number(value: float) -> float | str:
    return float(value) if math.isfinite(value) else str(float(value))
