"""The keys that take part in an A/B test, and their arms: each server writes its own log.

.rollout/ab/<rollout>/assignments-<server>-0001.jsonl       {"at": seconds, "key": "hash", "arm": version}

A line is written when the first request of a key was answered. The weights of a test do not change, so all servers
give a key the same arm; if logs differ nevertheless, the earliest line counts.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from pathlib import Path

import numpy as np

from stoker.core.errors import UserError
from stoker.rollout.ab.append_log import LogReader, LogWriter, sync_and_close

_KEY = re.compile(rb'"key":"([0-9a-f]{16})"')

_log = logging.getLogger(__name__)


def logs_of(folder: Path, rollout: int) -> Path:
    """Return the folder with the logs of a test.

    Args:
        folder: Folder of the rollout's state.
        rollout: Number of the rollout.
    """
    return folder / "ab" / str(rollout)


def key_text(key: int) -> str:
    """Return the hash of a key as the text that the logs contain."""
    return f"{key:016x}"


class AssignmentLog:
    """The keys of one test that a server knows, and the log that the server writes; thread-safe."""

    def __init__(self, folder: Path, *, server: str, max_keys: int) -> None:
        """Create the log; the keys of other servers are known after `refresh`.

        Args:
            folder: Folder of the test's logs.
            server: Name of this process, unique among all processes that serve the model.
            max_keys: Maximum number of keys that are recorded.
        """
        self._mine = f"assignments-{server}-"
        self._writer = LogWriter(folder, self._mine.removesuffix("-"))
        self._reader = LogReader(folder, "assignments-*")
        self._max_keys = max_keys
        self._keys: set[int] = set()
        self._lock = threading.Lock()
        self._reading = threading.Lock()
        self._is_reported = False

    def record(self, key: int, version: int) -> None:
        """Write the arm of a key, if this is the first request of the key that this server knows of.

        A failure to write is logged once; the next request of the key tries again.
        """
        if key in self._keys:
            return
        with self._lock:
            if key in self._keys or len(self._keys) >= self._max_keys:
                return
            line = f'{{"at":{time.time():.3f},"key":"{key_text(key)}","arm":{version}}}'
            try:
                self._writer.append([line.encode()])
            except (OSError, UserError) as error:
                if not self._is_reported:
                    _log.error("keys of an A/B test are not recorded: %s", error)
                self._is_reported = True
                return
            self._keys.add(key)
            self._is_reported = False

    def refresh(self) -> None:
        """Read the keys of other servers, and flush this server's keys to the disk.

        Raises:
            OSError: the files cannot be read or written.
        """
        with self._reading:
            for block in self._reader.blocks(but=self._mine):
                # A JSON parser would build a dictionary for each of 1,000,000 lines; only the keys are needed.
                found = bytes.fromhex(b"".join(_KEY.findall(block)).decode())
                self._keys.update(np.frombuffer(found, dtype=">u8").tolist())
        with self._lock:
            handle = self._writer.to_sync()
        if handle is not None:
            sync_and_close(handle)

    def unknown(self, keys: set[int]) -> set[int]:
        """Return those of the keys for which no server has answered a request."""
        if not keys <= self._keys:
            self.refresh()
        return keys - self._keys

    def close(self) -> None:
        """Flush the log, and close it."""
        with self._lock:
            self._writer.close()
