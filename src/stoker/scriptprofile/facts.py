"""Reads the files that the watcher wrote: one `WatchedProcess` per file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from stoker.scriptprofile.loops import LOOPS, Loop
from stoker.scriptprofile.observations import (
    BatchHook,
    Feed,
    FirstPass,
    Function,
    Node,
    Place,
    Stage,
    WallPart,
    to_place,
)

VERSION = 1
"""Version of the file format; files of other versions are ignored."""

_DEVICE = ("cores", "intra_op_threads", "tensor_float_32")
"""Settings of the machine on which the measured peak depends."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WatchedProcess:
    """All observations about one process of the script."""

    tensorflow: str
    """TensorFlow's version; empty if it was not imported."""
    keras: Mapping[str, Any]
    """Keras's `version`, `floatx` and `backend`; empty if it was not imported."""
    gpus: int
    gpu_peak_bytes: tuple[int, ...]
    """Peak memory that TensorFlow used on each GPU."""
    peak_memory_bytes: int
    """Peak host memory of the process."""
    functions_run_eagerly: bool
    loops: tuple[Loop, ...]
    functions: tuple[Function, ...]
    strategies: tuple[tuple[str, Place, int], ...]
    """Kind, line and number of replicas of each distribution strategy."""
    failures: tuple[str, ...]
    """Errors of the watcher itself."""
    on_batches: tuple[tuple[Place, int], ...] = ()
    """Lines that call `train_on_batch`, and the number of calls."""
    wall_parts: tuple[WallPart, ...] = ()
    """The parts of the process's wall time; the rest of the time is the script's own code."""
    since_start_s: float = 0.0
    """Time from the process's start to its last report, seconds; 0 if unknown."""
    device: Mapping[str, Any] = field(default_factory=dict)
    """Settings of its machine: `cores`, `intra_op_threads`, `tensor_float_32`."""
    waited: float = 0.0
    """Of the time in which its threads ran or could have run: the share, in [0, 1], in which they waited for a core
    that another program used."""


def read_all(folder: Path) -> list[WatchedProcess]:
    """Read the facts of every watched process, sorted by the number of training steps, descending.

    Args:
        folder: Folder of the watchers' files.
    """
    files = (_frozen(json.loads(path.read_text())) for path in sorted(folder.glob("facts-*.json")))
    found = [_process(facts) for facts in files if facts.get("version") == VERSION]
    return sorted(found, key=lambda process: -sum(loop.steps for loop in process.loops))


def _frozen(value: Any) -> Any:
    """Return parsed JSON with its lists converted to tuples."""
    if isinstance(value, dict):
        return {key: _frozen(each) for key, each in value.items()}
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _process(facts: Mapping[str, Any]) -> WatchedProcess:
    stages = {each["id"]: _stage(each) for each in facts.get("stages_made", ())}
    machine, wall = facts.get("machine", {}), facts.get("wall", {})
    common = {"pid": facts["pid"], "cores": max(1, len(machine.get("cores", ())))}
    trained = [each for key in ("fits", "loops") for each in facts.get(key, ()) if each["steps"]]
    return WatchedProcess(
        tensorflow=facts.get("versions", {}).get("tensorflow", ""),
        keras=facts.get("keras", {}),
        gpus=machine.get("gpus", 0),
        gpu_peak_bytes=machine.get("gpu_peak_bytes", ()),
        peak_memory_bytes=facts.get("peak_memory_bytes", 0),
        functions_run_eagerly=machine.get("functions_run_eagerly", False),
        device={name: machine[name] for name in _DEVICE if name in machine},
        loops=tuple(_loop({**each, **common}, stages) for each in trained),
        functions=tuple(
            Function(**_fields(Function, each) | {"place": _place(each["place"])})
            for each in facts.get("functions", ())
        ),
        strategies=tuple(
            (each["kind"], _place(each["place"]), each["replicas"])
            for each in facts.get("strategies", ())
        ),
        failures=facts.get("failures", ()),
        wall_parts=tuple(
            WallPart(kind=kind, place=_place(at), wall_s=wall_s, cpu_s=cpu_s, calls=int(calls))
            for kind, at, wall_s, cpu_s, calls in wall.get("parts", ())
        ),
        since_start_s=wall.get("total_s", 0.0),
        on_batches=_counts(facts.get("on_batches", ())),
        waited=_waited(facts.get("load", {})),
    )


def _fields(kind: type, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return only the facts that are fields of a dataclass."""
    names = {each.name for each in fields(kind)}
    return {name: value for name, value in facts.items() if name in names}


def _waited(load: Mapping[str, float]) -> float:
    wanted_s = load.get("run_s", 0.0) + load.get("waited_s", 0.0)
    return load["waited_s"] / wanted_s if wanted_s > 0 else 0.0


def _place(row: Sequence[Any]) -> Place:
    return Place(file=str(row[0]), line=int(row[1]))


def _counts(rows: Sequence[Sequence[Any]]) -> tuple[tuple[Place, int], ...]:
    """Convert rows of file, line and number to pairs of place and number."""
    return tuple((_place(row), row[2]) for row in rows)


def _stage(facts: Mapping[str, Any]) -> Stage:
    converted = {
        "place": _place(facts["place"]),
        "in_user_code": facts["maker"] == "user",
        "python_calls": tuple(map(_place, facts["python_calls"])),
    }
    return Stage(**_fields(Stage, facts) | converted)


def _loop(facts: Mapping[str, Any], stages: Mapping[int, Stage]) -> Loop:
    kind = LOOPS[facts["kind"]]
    converted = {
        "place": _place(facts["place"]),
        "rows": max(0, facts["rows"]),
        "stages": tuple(stages[each] for each in facts["stages"] if each in stages),
        "nodes": tuple(Node(**_fields(Node, each)) for each in facts["nodes"]),
        "first_pass": _first_pass(facts["cache"]),
        "feed": _feed(facts["model"].get("feed")),
        "hooks": tuple(_hook(each, facts["hooked_steps"]) for each in facts.get("hooks", ())),
    }
    counts = ("syncs", "eager_gradients", "step_calls")
    converted |= {name: _counts(facts.get(name, ())) for name in counts}
    return kind(**_fields(kind, {**facts, **converted}))


def _first_pass(cache: Mapping[str, Any] | None) -> FirstPass | None:
    if cache is None or len(cache["passes_s"]) < 2:
        return None
    first_s, *later_s = cache["passes_s"]
    return FirstPass(
        longer_s=max(0.0, first_s - sum(later_s) / len(later_s)),
        wall_s=cache["wall_s"],
        away=cache["away"],
        nodes=tuple(Node(**_fields(Node, each)) for each in cache["nodes"]),
        nodes_s=cache["nodes_s"],
    )


def _feed(facts: Mapping[str, Any] | None) -> Feed | None:
    if facts is None:
        return None
    return Feed(**_fields(Feed, facts) | {"place": to_place(facts["place"])})


def _hook(facts: Mapping[str, Any], steps: int) -> BatchHook:
    return BatchHook(
        name=facts["name"],
        hook=facts["hook"],
        place=to_place(facts["place"]),
        step_s=facts["seconds"] / max(1, steps),
    )
