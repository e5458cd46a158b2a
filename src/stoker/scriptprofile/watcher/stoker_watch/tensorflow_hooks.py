"""Puts the watcher around TensorFlow's public names; all that it watches is called from here."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

from . import functions, loops, stages
from .device_trace import TRACER
from .places import who_called
from .wall import LOAD, WALL
from .watch import FACTS, wrap


def install(tf: ModuleType) -> None:
    """Watch datasets, their iterators, `tf.function`, gradients and strategies."""
    stages.install(tf)
    loops.install(tf)
    functions.install(tf)
    _strategies(tf)
    TRACER.install(tf, lines=lambda: list(loops.STATE.loops.values()))
    FACTS.parts["wall"] = WALL.told
    FACTS.parts["load"] = LOAD.told
    LOAD.begin()
    FACTS.forgets += [WALL.forget, LOAD.begin]
    FACTS.parts["versions"] = lambda: {"tensorflow": str(tf.__version__)}
    FACTS.parts["stages_made"] = stages.made
    FACTS.parts["loops"] = loops.told
    FACTS.parts["functions"] = functions.told
    FACTS.forgets += [loops.forget, functions.forget, STRATEGIES.clear]
    FACTS.parts["machine"] = lambda: _machine(tf)


STRATEGIES: list[dict[str, Any]] = []
"""Every `tf.distribute.Strategy` that the user's code made, and where."""


def _strategies(tf: Any) -> None:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            with FACTS.guarded():
                kind = type(self).__name__
                if "Strategy" in kind and not kind.startswith("_"):
                    place, maker = who_called()
                    if maker == "user":
                        replicas = int(self.num_replicas_in_sync)
                        STRATEGIES.append({"kind": kind, "place": place, "replicas": replicas})

        return init

    wrap(tf.distribute.Strategy, "__init__", make)
    FACTS.parts["strategies"] = lambda: list(STRATEGIES)


def _machine(tf: Any) -> dict[str, Any]:
    # Once a step has run, asking for devices starts nothing that the script has not started.
    if not (loops.any_step() or FACTS.parts.get("fits", list)()):
        return {}
    gpus = len(tf.config.list_logical_devices("GPU"))
    return {
        "gpus": gpus,
        "gpu_peak_bytes": [
            tf.config.experimental.get_memory_info(f"GPU:{index}")["peak"] for index in range(gpus)
        ],
        "functions_run_eagerly": bool(tf.config.functions_run_eagerly()),
        "cores": sorted(os.sched_getaffinity(0)),
        "intra_op_threads": int(tf.config.threading.get_intra_op_parallelism_threads()),
        "tensor_float_32": bool(tf.config.experimental.tensor_float_32_execution_enabled()),
    }
