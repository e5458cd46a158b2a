"""What a watcher might have seen, to be changed at will."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from stoker.scriptprofile.facts import WatchedProcess
from stoker.scriptprofile.loops import DatasetLoop, FitLoop, Loop, OwnLoop
from stoker.scriptprofile.observations import Node, Place, Stage


def at(line: int) -> Place:
    return Place(file="/home/me/train.py", line=line)


def stage(kind: str, line: int, **changes: Any) -> Stage:
    made = Stage(
        kind=kind,
        place=at(line),
        in_user_code=True,
        arguments={},
        python_calls=(),
        random=False,
        element_bytes=1000,
        dtypes=("float32",),
        cardinality=1000,
    )
    return replace(made, **changes)


def node(name: str, cpu_s: float = 0.001, **changes: Any) -> Node:
    made = Node(
        name=name,
        cpu_s=cpu_s,
        elements=100,
        ratio=32.0 if "Batch" in name else 1.0,
        per_output=1.0,
        buffered=0,
        buffered_bytes=0,
        parameters={},
    )
    return replace(made, **changes)


def common() -> dict[str, Any]:
    """Of a line that spends 10 ms a step, 6 of them in its tf.function."""
    return {
        "place": at(40),
        "passes": 1,
        "steps": 102,
        "measured_steps": 100,
        "first_s": 1.0,
        "period_s": 1.0,
        "call_s": 0.6,
        "rows": 32,
        "stages": (stage("prefetch", 9), stage("batch", 8), stage("from_tensor_slices", 7)),
        "nodes": (node("Root"), node("Prefetch"), node("BatchV2"), node("TensorSlice")),
        "timeline": (),
        "cores": 4,
    }


def loop(kind: type[OwnLoop] = DatasetLoop, **changes: Any) -> OwnLoop:
    """A loop of the user's own that waits 3 ms a step."""
    return kind(**{**common(), "wait_s": 0.3, **changes})


def fit(
    *, real_s: float = 0.01, ceiling_s: float = 0.0095, wait: float = 0.0, **changes: Any
) -> FitLoop:
    """A fit, three rounds of ten steps."""
    one: Mapping[str, float] = {
        "calls": 10,
        "real_s": 10 * real_s,
        "ceiling_s": 10 * ceiling_s,
        "gap_s": 10 * real_s * (1 - wait),
        "gap_of_s": 10 * real_s,
    }
    model = {
        "steps_per_execution": 1,
        "replicas": 1,
        "compiled": ["/home/me/train.py", 20],
        "made": ["/home/me/train.py", 10],
        "policy": "float32",
    }
    return FitLoop(**{**common(), "rounds": (one,) * 3, "model": model, **changes})


def watched(*loops: Loop, **changes: Any) -> WatchedProcess:
    made = WatchedProcess(
        tensorflow="2.21.0",
        keras={},
        gpus=0,
        gpu_peak_bytes=(),
        peak_memory_bytes=0,
        functions_run_eagerly=False,
        loops=loops,
        functions=(),
        strategies=(),
        failures=(),
    )
    return replace(made, **changes)
