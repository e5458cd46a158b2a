"""What the watcher wrote, read back: loops, stages and functions of one process."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from stoker.measure.device_time import DeviceTime
from stoker.scriptprofile.mfu import Reached

VERSION = 1
"""Of the file's form."""

Kind = Literal["fit", "dataset", "calls", "inside"]
"""`model.fit`; a loop over a dataset; calls of a step in a loop of any kind; a loop inside of a
tf.function, whose steps nobody sees."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A line of a file of the user's."""

    file: str
    """Absolute path; empty where it is not known."""

    line: int
    """From 1."""

    def __str__(self) -> str:
        """`train.py:12`."""
        return f"{Path(self.file).name}:{self.line}" if self.file else "?"


NOWHERE = Place(file="", line=0)
"""Where no line of the user's is known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One call in the making of a dataset."""

    kind: str
    """The method's name: `map`, `from_generator`."""

    place: Place
    """Where it was called."""

    by_user: bool
    """Called by the user's own code, and not for it by Keras or another library."""

    arguments: Mapping[str, Any]
    """Those that are numbers."""

    python_calls: tuple[Place, ...]
    """Where `tf.py_function` or `tf.numpy_function` stands inside of it."""

    random: bool
    """Draws random numbers."""

    element_bytes: int | None
    """Bytes of one element that it gives, where every dimension is known."""

    dtypes: tuple[str, ...]
    """Of the parts of an element."""

    cardinality: int
    """Elements of a pass; negative where it is infinite or unknown."""

    operations: tuple[str, ...] = ()
    """Types of the TensorFlow operations in a map's function."""

    row_bytes: int | None = None
    """Bytes of one row of an element of which only the number of rows is not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Feed:
    """What Python makes the batches of a `fit` with."""

    kind: str
    """`PyDataset`, `generator` or `DataLoader`."""

    name: str
    """Of its class; empty for a generator."""

    place: Place | None
    """Where its code stands."""

    workers: int
    """Of a PyDataset."""

    processes: bool
    """Its workers are processes, and not threads."""

    def told(self) -> str:
        """`the PyDataset Images (workers=1)`."""
        if self.kind != "PyDataset":
            return f"the {self.kind} {self.name}".strip()
        processes = ", use_multiprocessing=True" if self.processes else ""
        return f"the PyDataset {self.name} (workers={self.workers}{processes})"


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchHook:
    """What a callback of a `fit` does before or after each batch."""

    name: str
    """Of the callback's class."""

    hook: str
    """The method's name: `on_train_batch_end`."""

    place: Place | None
    """Where its code begins; None where it is not the user's."""

    step_s: float
    """Seconds a step, on the mean."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """A stage as TensorFlow really ran it."""

    name: str
    """TensorFlow's name: `ParallelMapV2`, `MapAndBatch`."""

    cpu_s: float
    """CPU time by now, seconds."""

    elements: int
    """Elements given by now."""

    ratio: float
    """Elements read for one that is given; 0 where that is no rule."""

    per_output: float
    """Its elements for one of the last interleave or flat_map above it; 1 where there is none."""

    buffered: int
    """Elements that it held."""

    buffered_bytes: int
    """Their bytes."""

    parameters: Mapping[str, tuple[float, bool]]
    """Name -> value, and whether TensorFlow tunes it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Function:
    """A `tf.function` that Python called, by the code that it was made of."""

    name: str
    place: Place
    calls: int
    traces: int
    made: int
    """How many tf.functions were made of this code."""
    causes: tuple[Mapping[str, str], ...]
    """For the first traces: argument -> dtype and shape, or the Python value."""
    trace_s: float
    """Time of the calls that traced, seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstPass:
    """The first of several passes over a dataset that holds a cache, which it fills."""

    longer_s: float
    """How much longer it took than a later one, seconds; of a loop of the user's own, how much longer it
    waited for its input."""

    wall_s: float
    """Wall time that it took, seconds."""

    away: float
    """The share of it that would not have passed on a machine without other programs."""

    nodes: tuple[Node, ...]
    """As TensorFlow ran it meanwhile, last one first; empty where that was not seen."""

    nodes_s: float
    """From its begin to when they were read, seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Loop:
    """One line that trains."""

    kind: Kind
    place: Place
    passes: int
    steps: int
    measured_steps: int
    first_s: float
    """Time of the steps that are set apart, seconds: they traced, compiled, warmed up, filled a cache,
    or came right after a window of U."""
    period_s: float
    """Time of the measured steps, begin to begin, seconds; so are the following."""
    wait_s: float
    call_s: float
    sync_s: float
    rows: int
    """Samples of a step, 0 where unknown."""
    stages: tuple[Stage, ...]
    """Last one first."""
    nodes: tuple[Node, ...]
    """Last one first; empty where TensorFlow kept none."""
    timeline: tuple[tuple[float, float, float, float, float], ...]
    """Of the first steps: begin, wait, call, synchronise, period; seconds."""
    syncs: tuple[tuple[Place, int], ...] = ()
    eager_gradients: tuple[tuple[Place, int], ...] = ()
    step_calls: tuple[tuple[Place, int], ...] = ()
    """Where these were computed: the line of each of the user's functions that ran and its first line,
    the innermost function first."""
    elements: tuple[str, ...] = ()
    rounds: tuple[Mapping[str, float], ...] = ()
    """Pairs of windows with real data and on a resident batch."""
    gaps: tuple[tuple[float, float], ...] = ()
    """Of a fit, for some steps in a row: time between two elements of the input, whole time."""
    batches: int = 0
    """Of a loop inside of a tf.function: steps of one call; 0 where unknown."""
    no_ceiling: str = ""
    """Why there are none."""
    model: Mapping[str, Any] = field(default_factory=dict)
    """Of a fit: what is known of the model; of a loop how many replicas share a batch."""
    feed: Feed | None = None
    """Of a fit whose batches Python makes."""
    hooks: tuple[BatchHook, ...] = ()
    """Of a fit's callbacks."""
    pid: int = 0
    """Of its process."""
    cores: int = 1
    """That its process may use."""
    starts: tuple[float, ...] = ()
    """Of a fit: from the begin of each epoch but the first to the end of its first step, seconds."""
    step: Mapping[str, Any] = field(default_factory=dict)
    """Where the graph of its step was written, or why it was not."""
    reached: Reached | None = None
    """What its step computes, and what the device reaches; None: nobody has asked."""
    trace: Mapping[str, Any] = field(default_factory=dict)
    """Where a trace of its devices was written, or why there is none."""
    device: DeviceTime | None = None
    """Device time by kernel class, from that trace."""
    no_device: str = ""
    """Why there is none although there is a device to trace."""
    ours_s: float = 0.0
    """Time that the measurement took beside the steps, seconds."""
    first_pass: FirstPass | None = None
    """None where no cache was filled, or no later pass read it."""
    load: Mapping[str, float] = field(default_factory=dict)
    """Of some steps of a loop: wall time and what other programs took of it, and what lay outside of
    calls (`wall_s`, `away_s`, `wait_s`, `python_s`, `python_run_s`); empty where it is not known."""

    def asked_for(self) -> list[Stage]:
        """Stages that the user wrote, or had made by a call of their own: not those of `fit` for arrays."""
        near = (self.place, NOWHERE)
        return [each for each in self.stages if each.by_user or each.place not in near]

    def counted(self) -> str:
        """`1,000 steps`, or calls of several."""
        if self.kind == "inside":
            return f"{self.steps:,} calls{f' of {self.batches:,} steps' if self.batches else ''}"
        together = int(self.model.get("steps_per_execution", 1))
        return f"{self.steps:,} {'steps' if together == 1 else f'calls of {together} steps'}"


@dataclass(frozen=True, kw_only=True, slots=True)
class WallPart:
    """The wall time of one line in a process, without nested parts."""

    kind: str
    """`imports`, `fit`, `validation`, `evaluate`, `predict`, `callbacks` or `saving`."""

    place: Place
    wall_s: float
    cpu_s: float
    """CPU time of all threads during it."""
    calls: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """All that was seen in one process."""

    pid: int
    argv: tuple[str, ...]
    tensorflow: str
    keras: Mapping[str, Any]
    gpus: int
    gpu_peak_bytes: tuple[int, ...]
    """Most that TensorFlow had in use at once, GPU by GPU."""
    peak_memory_bytes: int
    """Most of the host's memory that the process held at once."""
    functions_run_eagerly: bool
    wall_s: float
    cpu_s: float
    loops: tuple[Loop, ...]
    functions: tuple[Function, ...]
    stages: tuple[Stage, ...]
    strategies: tuple[tuple[str, Place, int], ...]
    """Kind, line and replicas."""
    failures: tuple[str, ...]
    """What went wrong with the watcher itself."""
    on_batches: tuple[tuple[Place, int], ...] = ()
    """Lines that call `train_on_batch`, and how often."""
    wall_parts: tuple[WallPart, ...] = ()
    """The parts of its wall time; the rest is the script's own."""
    since_start_s: float = 0.0
    """Time from the process's start to its last report, seconds; 0 if unknown."""
    device: Mapping[str, Any] = field(default_factory=dict)
    """What its TensorFlow ran on: `cores`, `intra_op_threads`, `tensor_float_32`."""
    waited: float = 0.0
    """Of the time that its threads wanted a core, the share in which another program had it, in [0, 1]."""


BUSY = 0.2
"""A share `waited` from which on the machine was busy with other work."""

_DEVICE = ("cores", "intra_op_threads", "tensor_float_32")
"""Of the machine, what a peak depends on."""


def place_told(told: object) -> Place | None:
    """A place as the watcher told it; None where it was not known."""
    if isinstance(told, (list, tuple)) and len(told) == 2 and told[0]:
        return Place(file=str(told[0]), line=int(told[1]))
    return None


def read_all(folder: Path) -> list[Seen]:
    """Every process that was watched, those that trained first.

    Args:
        folder: Where the watchers wrote.
    """
    found = []
    for path in sorted(folder.glob("facts-*.json")):
        told = json.loads(path.read_text())
        if told.get("version") == VERSION:
            found.append(_seen(told))
    return sorted(found, key=lambda seen: -sum(loop.steps for loop in seen.loops))


def _seen(told: Mapping[str, Any]) -> Seen:
    stages = {each["id"]: _stage(each) for each in told.get("stages_made", ())}
    machine = told.get("machine", {})
    loops = [_loop(each, stages) for each in told.get("loops", ())]
    fits = [_fit(each, stages) for each in told.get("fits", ())]
    of_process = {"pid": told["pid"], "cores": max(1, len(machine.get("cores", ())))}
    trained = [replace(loop, **of_process) for loop in (*fits, *loops) if loop.steps]
    return Seen(
        pid=told["pid"],
        argv=tuple(told.get("argv", ())),
        tensorflow=told.get("versions", {}).get("tensorflow", ""),
        keras=told.get("keras", {}),
        gpus=machine.get("gpus", 0),
        gpu_peak_bytes=tuple(machine.get("gpu_peak_bytes", ())),
        peak_memory_bytes=told.get("peak_memory_bytes", 0),
        functions_run_eagerly=machine.get("functions_run_eagerly", False),
        device={name: machine[name] for name in _DEVICE if name in machine},
        wall_s=told.get("wall_s", 0.0),
        cpu_s=told.get("cpu_s", 0.0),
        loops=tuple(trained),
        functions=tuple(_function(each) for each in told.get("functions", ())),
        stages=tuple(stages.values()),
        strategies=tuple(
            (each["kind"], _place(each["place"]), each["replicas"])
            for each in told.get("strategies", ())
        ),
        failures=tuple(told.get("failures", ())),
        wall_parts=tuple(_wall_part(each) for each in told.get("wall", {}).get("parts", ())),
        since_start_s=told.get("wall", {}).get("total_s", 0.0),
        on_batches=tuple((_place(each), each[2]) for each in told.get("on_batches", ())),
        waited=_waited(told.get("load", {})),
    )


def _waited(load: Mapping[str, float]) -> float:
    wanted_s = load.get("run_s", 0.0) + load.get("waited_s", 0.0)
    return load["waited_s"] / wanted_s if wanted_s > 0 else 0.0


def _wall_part(told: Sequence[Any]) -> WallPart:
    kind, at, wall_s, cpu_s, calls = told
    return WallPart(kind=kind, place=_place(at), wall_s=wall_s, cpu_s=cpu_s, calls=int(calls))


def _place(told: Sequence[Any]) -> Place:
    return Place(file=str(told[0]), line=int(told[1]))


def _stage(told: Mapping[str, Any]) -> Stage:
    return Stage(
        kind=told["kind"],
        place=_place(told["place"]),
        by_user=told["maker"] == "user",
        arguments=told["arguments"],
        python_calls=tuple(_place(each) for each in told["python_calls"]),
        random=told["random"],
        element_bytes=told["element_bytes"],
        dtypes=tuple(told["dtypes"]),
        cardinality=told["cardinality"],
        row_bytes=told["row_bytes"],
        operations=tuple(told["operations"]),
    )


def _node(told: Mapping[str, Any]) -> Node:
    return Node(
        name=told["name"],
        cpu_s=told["cpu_ns"] / 1e9,
        elements=told["elements"],
        ratio=told["ratio"],
        per_output=told["per_output"],
        buffered=told["buffered"],
        buffered_bytes=told["buffered_bytes"],
        parameters={name: (value, tuned) for name, (value, tuned) in told["parameters"].items()},
    )


def _function(told: Mapping[str, Any]) -> Function:
    return Function(
        name=told["name"],
        place=_place(told["place"]),
        calls=told["calls"],
        traces=told["traces"],
        made=told["made"],
        causes=tuple(told["causes"]),
        trace_s=told["trace_s"],
    )


def _loop(told: Mapping[str, Any], stages: Mapping[int, Stage]) -> Loop:
    return Loop(
        kind=told["kind"],
        place=_place(told["place"]),
        passes=told["passes"],
        steps=told["steps"],
        measured_steps=told["measured_steps"],
        first_s=told["first_s"],
        period_s=told["period_s"],
        wait_s=told["wait_s"],
        call_s=told["call_s"],
        sync_s=told["sync_s"],
        rows=max(0, told["rows"]),
        model={"replicas": told.get("replicas", 1), "distributed": told["distributed"]},
        stages=tuple(stages[each] for each in told["stages"] if each in stages),
        nodes=tuple(map(_node, told["nodes"])),
        timeline=_timeline(told),
        syncs=tuple((_place(each), each[2]) for each in told["syncs"]),
        eager_gradients=tuple((_place(each), each[2]) for each in told["eager_gradients"]),
        step_calls=tuple((_place(each), each[2]) for each in told["step_calls"]),
        elements=tuple(told["elements"]),
        rounds=tuple(told["rounds"]),
        batches=told["batches"],
        no_ceiling=told["no_ceiling"],
        load=told["load"],
        first_pass=_first_pass(told),
        step=told["step"],
        trace=told["trace"],
        ours_s=told["ours_s"],
    )


def _fit(told: Mapping[str, Any], stages: Mapping[int, Stage]) -> Loop:
    return Loop(
        kind="fit",
        place=_place(told["place"]),
        passes=told["epochs"],
        steps=told["steps"],
        measured_steps=told["measured_steps"],
        first_s=told["first_s"],
        period_s=told["period_s"],
        wait_s=0.0,
        call_s=told["call_s"],
        sync_s=0.0,
        rows=max(0, told["rows"]),
        stages=tuple(stages[each] for each in told["stages"] if each in stages),
        nodes=tuple(map(_node, told["nodes"])),
        timeline=_timeline(told),
        rounds=tuple(told["rounds"]),
        gaps=tuple((gap_s, of_s) for gap_s, of_s in told["gaps"]),
        no_ceiling=told["no_ceiling"],
        model=told["facts"],
        feed=_feed(told["facts"].get("feed")),
        hooks=tuple(_hook(each, told["hooked_steps"]) for each in told["hooks"]),
        starts=tuple(told["starts"]),
        first_pass=_first_pass(told),
        step=told["step"],
        trace=told["trace"],
        ours_s=told["ours_s"],
    )


def _first_pass(told: Mapping[str, Any]) -> FirstPass | None:
    cache = told["cache"] or {"passes_s": []}
    first_s, *later_s = cache["passes_s"] or [0.0]
    if not later_s:
        return None
    return FirstPass(
        longer_s=max(0.0, first_s - sum(later_s) / len(later_s)),
        wall_s=cache["wall_s"],
        away=cache["away"],
        nodes=tuple(map(_node, cache["nodes"])),
        nodes_s=cache["nodes_s"],
    )


def _feed(told: Mapping[str, Any] | None) -> Feed | None:
    if told is None:
        return None
    return Feed(
        kind=told["kind"],
        name=told["name"],
        place=place_told(told["place"]),
        workers=told["workers"],
        processes=told["processes"],
    )


def _hook(told: Mapping[str, Any], steps: int) -> BatchHook:
    return BatchHook(
        name=told["name"],
        hook=told["hook"],
        place=place_told(told["place"]),
        step_s=told["seconds"] / max(1, steps),
    )


def _timeline(told: Mapping[str, Any]) -> tuple[tuple[float, float, float, float, float], ...]:
    return tuple((row[0], row[1], row[2], row[3], row[4]) for row in told["timeline"])
