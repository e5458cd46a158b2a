"""What servers counted of a rollout: a file for each process, next to the state.

folder/counts/<rollout>/<server>.json       stage -> version -> counts; written every second

The files of servers that have ended stay: what they counted still counts.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from stoker.core.files import write_json
from stoker.rollout.gates import StageCounts, VersionCounts
from stoker.rollout.stages import Stage, parse_stages
from stoker.rollout.state import RolloutState

MEASURED = -1
"""Stands for a stage while the baseline is measured."""

Counts = Mapping[int, Mapping[int, VersionCounts]]
"""Stage -> version -> counts."""


def write_counts(
    folder: Path, counts: Counts, failed: Mapping[int, str], *, rollout: int, server: str
) -> None:
    """Write what one process has counted since it began.

    Args:
        folder: of the rollout's state.
        counts: of each stage.
        failed: version -> why the process cannot run it.
        rollout: number of the rollout.
        server: name of the process.
    """
    path = _folder(folder, rollout) / f"{server}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    stages = {
        str(stage): {str(version): _to_json(each) for version, each in versions.items()}
        for stage, versions in counts.items()
    }
    write_json(path, {"stages": stages, "failed": {str(key): why for key, why in failed.items()}})


def read_counts(folder: Path, *, rollout: int) -> dict[int, dict[int, VersionCounts]]:
    """Return the counts of all processes, added up."""
    found: dict[int, dict[int, VersionCounts]] = {}
    for counts, _ in _contents(folder, rollout):
        for stage, versions in counts.items():
            mine = found.setdefault(stage, {})
            for version, each in versions.items():
                mine.setdefault(version, VersionCounts()).add(each)
    return found


def read_failures(folder: Path, *, rollout: int) -> dict[int, str]:
    """Return version -> why a process cannot run it."""
    return {
        version: why for _, failed in _contents(folder, rollout) for version, why in failed.items()
    }


def _contents(folder: Path, rollout: int) -> Iterator[tuple[Counts, Mapping[int, str]]]:
    """Yield what each file holds; one that cannot be read is left out, since its server writes it again."""
    for path in sorted(_folder(folder, rollout).glob("*.json")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            content = json.loads(path.read_bytes())
            counts = {
                int(stage): {int(version): _of_json(each) for version, each in versions.items()}
                for stage, versions in content["stages"].items()
            }
            failed = {int(version): str(why) for version, why in content["failed"].items()}
            yield counts, failed


def stage_counts(counts: Counts, state: RolloutState) -> list[StageCounts]:
    """The counts of the stages that had traffic, oldest first."""
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
    # Of the requests of a shadow stage that count, each is answered once by either version.
    return 0.5 if stage.shadow else stage.share


def requests_of(counts: Counts, *, stage: int, version: int) -> int:
    """Answers of a version in a stage."""
    return counts.get(stage, {}).get(version, VersionCounts()).requests


def _folder(folder: Path, rollout: int) -> Path:
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
