"""Counts of a rollout, in one file per process of the servers, next to the state.

folder/counts/<rollout>/<server>.json       stage -> version -> counts; written every second

Files of processes that have ended stay, and their counts are still added up.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from stoker.core.errors import DataError, Plain, UserError
from stoker.core.files import write_atomic
from stoker.rollout.gates.gates import StageCounts, VersionCounts
from stoker.rollout.state.stages import Stage, parse_stages
from stoker.rollout.state.state import RolloutState

_log = logging.getLogger(__name__)

UNLOADED = "it cannot be loaded"
"""Prefix of the failure reason of a version that could not be loaded."""

MEASURED = -1
"""Number used as stage while the baseline is measured."""

Counts = Mapping[int, Mapping[int, VersionCounts]]
"""Stage -> version -> counts."""


def write_counts(
    folder: Path, counts: Counts, failed: Mapping[int, str], *, rollout: int, server: str
) -> None:
    """Write what one process has counted since it began.

    Args:
        folder: Folder of the rollout's state.
        counts: Counts of each stage.
        failed: Version -> why the process cannot run it.
        rollout: Number of the rollout.
        server: Name of the process.

    Raises:
        OSError: the file cannot be written, for example because the disk is full; the previous file stays
            intact.
    """
    path = counts_folder(folder, rollout) / f"{server}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    stages = {
        str(stage): {str(version): _to_json(each) for version, each in versions.items()}
        for stage, versions in counts.items()
    }
    content = {"stages": stages, "failed": {str(key): why for key, why in failed.items()}}
    # No `indent`: this runs every second, and `indent` would use json's slow encoder in Python.
    text = json.dumps({**content, "sha256": _digest(content)})
    try:
        write_atomic(path, text)
    except UserError as error:
        raise OSError(errno.ENOSPC, str(error)) from error


def read_all(
    folder: Path, *, rollout: int
) -> tuple[dict[int, dict[int, VersionCounts]], dict[int, str]]:
    """Return the sum of all processes' counts, and version -> why a process cannot run it."""
    found: dict[int, dict[int, VersionCounts]] = {}
    failures: dict[int, str] = {}
    for counts, failed in _contents(folder, rollout):
        for version, reason in failed.items():
            # A version that cannot be loaded on one server must not hide that the version hangs on another server.
            if failures.get(version, UNLOADED).startswith(UNLOADED):
                failures[version] = reason
        for stage, versions in counts.items():
            mine = found.setdefault(stage, {})
            for version, each in versions.items():
                mine.setdefault(version, VersionCounts()).add(each)
    return found, failures


def read_counts(folder: Path, *, rollout: int) -> dict[int, dict[int, VersionCounts]]:
    """Return the sum of all processes' counts."""
    return read_all(folder, rollout=rollout)[0]


def read_failures(folder: Path, *, rollout: int) -> dict[int, str]:
    """Return version -> why a process cannot run it."""
    return read_all(folder, rollout=rollout)[1]


def _contents(folder: Path, rollout: int) -> Iterator[tuple[Counts, Mapping[int, str]]]:
    """Yield the content of each intact file; a server replaces its damaged file within a second."""
    for path in sorted(counts_folder(folder, rollout).glob("[!.]*.json")):
        with contextlib.suppress(OSError):
            raw = path.read_bytes()
            try:
                yield parse_counts(_checked(raw, path))
            except DataError as error:
                _say_once(str(error))


@functools.lru_cache
def _say_once(error: str) -> None:
    """Log a damaged file once, because the counts are read every second."""
    _log.error("%s", error)


def _checked(raw: bytes, path: Path) -> Mapping[str, Any]:
    """Return the content of a file; raise DataError if it is damaged."""
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
        content: dict[str, Any] = json.loads(raw)
        if content.pop("sha256") == _digest(content):
            return content
    raise DataError(
        f"{path} is damaged, so its counts are left out",
        got=Plain("bytes that differ from the written ones"),
        fix="If the server of the file runs, do nothing: the server writes the file again.",
    )


def _digest(content: Mapping[str, Any]) -> str:
    """Return the hash of a JSON object. It takes a tenth of the time of `fingerprint`, because the loop runs in C."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def stage_counts(counts: Counts, state: RolloutState) -> list[StageCounts]:
    """Return the counts of the stages that had traffic, oldest first."""
    stages = parse_stages(state.settings.stages)
    return [
        StageCounts(
            share=0.0 if stage == MEASURED else _share(stages[stage]),
            is_shadow=stage != MEASURED and stages[stage].shadow > 0.0,
            baseline=versions.get(state.baseline, VersionCounts()),
            candidate=versions.get(state.candidate, VersionCounts()),
        )
        for stage, versions in sorted(counts.items())
        if MEASURED <= stage < len(stages)
    ]


def _share(stage: Stage) -> float:
    # In a shadow stage, both versions answer each counted request once, as if each had half of the traffic.
    return 0.5 if stage.shadow else stage.share


def requests_of(counts: Counts, *, stage: int, version: int) -> int:
    """Return the number of a version's answers in a stage."""
    return counts.get(stage, {}).get(version, VersionCounts()).requests


def parse_counts(content: Mapping[str, Any]) -> tuple[Counts, Mapping[int, str]]:
    """Parse the counts and failures in a file.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: the content does not have the expected form.
    """
    counts = {
        int(stage): {int(version): _of_json(each) for version, each in versions.items()}
        for stage, versions in content["stages"].items()
    }
    return counts, {int(version): str(why) for version, why in content["failed"].items()}


def counts_folder(folder: Path, rollout: int) -> Path:
    """Return the folder that contains the counts of a rollout."""
    return folder / "counts" / str(rollout)


def _to_json(counts: VersionCounts) -> dict[str, Any]:
    return {
        "requests": counts.requests,
        "bad": counts.bad,
        "latency": _pairs(counts.latency.items()),
        "predictions": _pairs(counts.predictions.items()),
        "shadow": dict(counts.shadow),
    }


def _pairs(items: Iterable[tuple[int, int]]) -> list[list[int]]:
    return [[bucket, count] for bucket, count in sorted(items)]


def _of_json(content: Mapping[str, Any]) -> VersionCounts:
    return VersionCounts(
        requests=int(content["requests"]),
        bad=int(content["bad"]),
        latency=Counter({int(bucket): int(count) for bucket, count in content["latency"]}),
        predictions=Counter({int(bucket): int(count) for bucket, count in content["predictions"]}),
        shadow=Counter(
            {str(name): int(count) for name, count in content.get("shadow", {}).items()}
        ),
    )
