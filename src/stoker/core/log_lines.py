"""Log messages as JSON, one object per line: time, level, run, worker, message (`--log-json`).

Everything that the process writes to standard error becomes such lines, so that programs need to read only one format.
An environment variable makes child processes do the same. Text that a native library writes directly to the descriptor
is not changed.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import threading
from collections.abc import Mapping, MutableMapping
from datetime import UTC, datetime
from typing import Any, TextIO, cast

FLAG = "--log-json"

VARIABLE = "STOKER_LOG_JSON"
"""Environment variable that makes a child process write JSON, too."""

KEYS = ("time", "level", "run", "worker", "message")
"""The fields of every line, in this order."""

HIDDEN = "***"

_NAMES = (
    *("password", "passwd", "secret", "token", "signature", "credential"),
    *("api_key", "apikey", "api-key", "access_key", "private_key"),
)
"""How the names of settings and variables with secret values end."""

_VALUE = r"[\"']?\s*[=:]\s*[\"']?[^\s\"',&;]+"
"""Matches what follows such a name: = or :, and the secret, perhaps in quotes."""

_SECRETS = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"(?<=://)[^/\s@]+(?=@)",  # user:password@ in a URL
        r"(?<=\bbearer )[^\s\"',]+",
        r"(?<=\bbasic )[a-z0-9+/=]{8,}",
        "".join(("(?:", "|".join(f"(?<={name})" for name in _NAMES), ")")) + _VALUE,
        r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b",
        r"\b(?:ghp|gho|ghs|github_pat|glpat|hf|sk|xox[abp])[-_][A-Za-z0-9_-]{16,}",
    )
)

_OF_WORKER = re.compile(r"\[worker (\d+)\] (.*)", re.DOTALL)
"""Matches a line of a worker's output, to which the launcher has added `[worker N]`."""

_facts = {"run": "", "worker": ""}


def wants_json(arguments: list[str], environ: Mapping[str, str]) -> bool:
    """Return whether a command line or an environment requires JSON."""
    return FLAG in arguments or environ.get(VARIABLE) == "1"


def enable(environ: MutableMapping[str, str]) -> None:
    """Write JSON from now on, in this process and its children.

    Args:
        environ: Environment of this process.
    """
    environ[VARIABLE] = "1"
    if sys.stderr is None or isinstance(sys.stderr, JsonStream):
        return
    sys.stderr = cast(TextIO, JsonStream(sys.stderr))
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    logging.getLogger().addHandler(handler)
    logging.captureWarnings(capture=True)


def set_facts(*, run: str = "", worker: str = "") -> None:
    """Name the run, or this worker, in all lines from now on."""
    _facts.update({key: value for key, value in (("run", run), ("worker", worker)) if value})


def write_error(text: str) -> bool:
    """Write an error as one line of JSON; return False if standard error is not JSON."""
    if not isinstance(sys.stderr, JsonStream):
        return False
    sys.stderr.emit(json_line("error", text))
    return True


def json_line(level: str, message: str, **more: Any) -> str:
    """Return a message as one JSON object, without a line break."""
    at = datetime.now(UTC).isoformat(timespec="milliseconds")
    values = {"time": at, "level": level, **_facts, "message": redacted(message)} | more
    return json.dumps(values, ensure_ascii=False)


def redacted(text: str) -> str:
    """Return a text without the passwords, tokens and keys that can be recognized by their form."""
    for pattern in _SECRETS:
        text = pattern.sub(_hidden, text)
    return text


def _hidden(match: re.Match[str]) -> str:
    found = match[0].lstrip("\"' ")
    return f"{found[0]}{HIDDEN}" if found[:1] in ("=", ":") else HIDDEN


class JsonFormatter(logging.Formatter):
    """Formats a log record as a line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line; a traceback is part of the message."""
        message = record.getMessage()
        if record.exc_info:
            message = f"{message}\n{self.formatException(record.exc_info)}"
        return json_line(record.levelname.lower(), message)


class JsonStream:
    """A text stream that writes each line as JSON; a line that is already JSON is not changed."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._partial = ""
        self._lock = threading.RLock()

    def write(self, text: str) -> int:
        """Write the lines that are complete, and keep the rest."""
        if not isinstance(text, str):
            raise TypeError("a text stream accepts only str")
        with self._lock:
            *lines, self._partial = (self._partial + text).split("\n")
            for line in lines:
                self._write_line(line)
        return len(text)

    def flush(self) -> None:
        """Flush the stream; an incomplete line is not written before its end."""
        self._stream.flush()

    def close(self) -> None:
        """Write an incomplete last line; the stream stays open."""
        with self._lock:
            line, self._partial = self._partial, ""
            self._write_line(line)

    def isatty(self) -> bool:
        """Return False: the output is for a program, not for a terminal."""
        return False

    def emit(self, line: str) -> None:
        """Write one line of JSON."""
        with self._lock:
            self._stream.write(line + "\n")
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        """Return any other attribute of the stream."""
        return getattr(self._stream, name)

    def _write_line(self, line: str) -> None:
        if line.strip():
            self.emit(_as_json(line))


def _as_json(line: str) -> str:
    if (of_worker := _OF_WORKER.match(line)) is not None:
        found = _parsed(of_worker[2])
        if found is not None and found.keys() >= set(KEYS):
            return json.dumps(found | {"worker": of_worker[1]}, ensure_ascii=False)
        return json_line("info", of_worker[2].strip(), worker=of_worker[1])
    found = _parsed(line)
    if found is None:
        return json_line("error" if line.startswith("Error:") else "info", line.strip())
    if found.keys() >= set(KEYS):
        return line
    if redacted(line) != line:
        return json_line("info", line.strip())
    # Another JSON object, for example a line of the access log.
    return json_line("info", "", fields=found)


def _parsed(line: str) -> dict[str, Any] | None:
    if not line.startswith("{"):
        return None
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
