"""The outcomes of an A/B test: numbers for what users did after an answer, which clients report.

.rollout/ab/<rollout>/outcomes-<server>-0001.jsonl       {"at": seconds, "key": "hash", "value": number}
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from stoker.core.errors import Plain, UserError
from stoker.core.files import alone
from stoker.rollout.ab.append_log import LogReader, LogWriter
from stoker.rollout.ab.assignments import key_text
from stoker.rollout.state.ab_settings import ABTestSettings

BYTES_A_KEY = 512
"""A test accepts `max_keys` times this many bytes of outcomes: about eight outcomes per key."""

SHOWN_KEYS = 3
"""Maximum number of unknown keys that an error message names."""

Unknown = Callable[[set[int]], set[int]]
"""Returns those of the given keys for which no server has answered a request."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The outcome of one user."""

    key: str
    """The user's key: value of the request's header or cookie."""

    value: float
    """The outcome: 1 or 0, or an amount."""


class UnknownKey(UserError):
    """No request with this key was answered during the test."""


class OutcomeLog:
    """Writes the outcomes that one process receives; thread-safe."""

    def __init__(self, folder: Path, test: ABTestSettings, *, name: str) -> None:
        """Create a log; the first outcome creates its file.

        Args:
            folder: Folder of the test's logs.
            test: Settings of the test.
            name: Name of the files, unique among all processes that write to the folder at the same time.
        """
        self._folder, self._test = folder, test
        self._writer = LogWriter(folder, f"outcomes-{name}")
        self._key_hash = test.key_hash()
        self._lock = threading.Lock()

    def add(self, outcomes: Sequence[Outcome], *, unknown: Unknown) -> None:
        """Write all of the outcomes, or none if one of them is refused.

        Args:
            outcomes: Outcomes of users.
            unknown: Returns, of the given keys, those that did not take part.

        Raises:
            UnknownKey: a key did not take part.
            UserError: a value is invalid, the log or the disk is full.
            OSError: the folder cannot be written.
        """
        hashes = [self._key_hash(os.fsencode(each.key)) for each in outcomes]
        for each in outcomes:
            self._test.check_value(each.value)
        missing = unknown(set(hashes))
        if missing:
            named = [each.key for each, key in zip(outcomes, hashes, strict=True) if key in missing]
            more = f" and {len(named) - SHOWN_KEYS} more" if len(named) > SHOWN_KEYS else ""
            raise UnknownKey(
                "The key of an outcome must have taken part in the A/B test",
                got=Plain(", ".join(map(repr, named[:SHOWN_KEYS])) + more),
                fix="Send the key of a request that was answered during the test.",
            )
        self._check_room()
        at_s = time.time()
        lines = [
            f'{{"at":{at_s:.3f},"key":"{key_text(key)}","value":{each.value!r}}}'.encode()
            for each, key in zip(outcomes, hashes, strict=True)
        ]
        with self._lock:
            self._writer.append(lines)
            self._writer.sync()

    def close(self) -> None:
        """Close the log's file."""
        with self._lock:
            self._writer.close()

    def _check_room(self) -> None:
        limit = BYTES_A_KEY * self._test.max_keys
        size = sum(path.stat().st_size for path in self._folder.glob("outcomes-*.jsonl"))
        if size >= limit:
            raise UserError(
                f"The outcomes of an A/B test must stay below {limit:,} bytes",
                got=Plain(f"{size:,} bytes"),
                fix="End the test, or begin one with a larger --max-keys.",
            )


def add_from_command(folder: Path, test: ABTestSettings, outcomes: Sequence[Outcome]) -> None:
    """Write outcomes from the command line; the commands on one machine share a file.

    Raises:
        The errors of `OutcomeLog.add`.
    """
    host = os.uname().nodename
    with alone(folder / f".outcomes-{host}.lock"):
        log = OutcomeLog(folder, test, name=f"command-{host}")
        try:
            log.add(outcomes, unknown=lambda keys: _unknown(folder, keys))
        finally:
            log.close()


def _unknown(folder: Path, keys: set[int]) -> set[int]:
    """Return those of the keys that are missing from the assignment logs."""
    missing = set(keys)
    for block in LogReader(folder, "assignments-*").blocks():
        missing -= {key for key in missing if f'"key":"{key_text(key)}"'.encode() in block}
    return missing
