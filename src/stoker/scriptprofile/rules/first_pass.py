"""A first pass that fills a cache: what it takes, and at which line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from stoker.scriptprofile.observations import Loop, Node, Stage
from stoker.scriptprofile.rules.finding import ScriptFinding
from stoker.scriptprofile.rules.input_rules import is_sequential, nodes_of
from stoker.scriptprofile.split import stages_of

CACHES = ("cache", "snapshot")
"""Stages that keep what was read in the first pass."""

_WORKS = ("map", "from_generator", "interleave", "flat_map", "filter")
"""Stages of which one is named where TensorFlow kept no figures."""


def filling_s(loop: Loop) -> float:
    """What the first pass takes for the work below its cache, seconds; 0 where there is none."""
    first = loop.first_pass
    if first is None or not _below(loop):
        return 0.0
    worked = _worked(loop)
    if worked and first.nodes_s > 0:
        # The first pass traces and compiles, too: its input took no longer than it worked.
        worked_s = sum(_work_s(node) for node, _ in worked)
        return min(first.longer_s, first.wall_s * worked_s / first.nodes_s)
    if any(stage is not None and stage.kind in CACHES for stage in _ran(loop)):
        # Nothing ran below the cache: an earlier loop had filled it.
        return 0.0
    return first.longer_s


def first_pass_findings(loop: Loop, *, seconds: float, share: float) -> Iterator[ScriptFinding]:
    """That a first pass takes long, at the line of its dearest stage.

    Args:
        loop: A line that trains.
        seconds: What filling its cache takes.
        share: Of the script's time without imports, in [0, 1].
    """
    stage = _dearest(loop)
    if stage is None or loop.first_pass is None:
        return
    ran = nodes_of(replace(loop, nodes=loop.first_pass.nodes), "map").get(stage.place)
    saved, change = share, _KEEP
    if stage.python_calls or stage.kind == "from_generator":
        change = f"Write it with TensorFlow's operations, in a parallel map; and {_KEEP}"
    elif stage.kind == "map" and is_sequential(stage, ran):
        saved = share * (1.0 - 1.0 / max(1, loop.cores))
        change = f".map(..., num_parallel_calls=tf.data.AUTOTUNE)  # and {_KEEP}"
    what = "the generator" if stage.kind == "from_generator" else f"this {stage.kind}"
    yield ScriptFinding(
        kind="slow_first_pass",
        place=stage.place,
        seen=f"{what} fills the cache in the first of {loop.passes} passes, which takes "
        f"{seconds:.3g} s longer than a later one, {share:.0%} of the script's time without imports",
        why="Training waits for it once in each run of the script, whatever later passes read.",
        change=change,
        gain=(1.0, 1.0 / max(0.05, 1.0 - saved)),
        sure="measured" if _worked(loop) else "likely",
    )


_KEEP = ".cache(a file name) keeps the results on disk: the next run of the script reads them"


def _below(loop: Loop) -> list[Stage]:
    """What was written below the cache, last one first."""
    cached = [number for number, stage in enumerate(loop.stages) if stage.kind in CACHES]
    below = loop.stages[cached[-1] + 1 :] if cached else ()
    return [stage for stage in below if stage.by_user]


def _worked(loop: Loop) -> list[tuple[Node, Stage]]:
    """What ran below the cache in the first pass, with the stage that asked for it."""
    nodes = loop.first_pass.nodes if loop.first_pass is not None else ()
    pairs = zip(nodes, _ran(loop), strict=True)
    below = _below(loop)
    return [(node, stage) for node, stage in pairs if stage is not None and stage in below]


def _ran(loop: Loop) -> list[Stage | None]:
    """For each node of the first pass the stage that asked for it."""
    nodes = loop.first_pass.nodes if loop.first_pass is not None else ()
    return stages_of(replace(loop, nodes=nodes))


def _work_s(node: Node) -> float:
    """Seconds that a stage was at work, its parallel calls at once."""
    return node.cpu_s / max(1.0, node.parameters.get("parallelism", (1.0, False))[0])


def _dearest(loop: Loop) -> Stage | None:
    worked = _worked(loop)
    if worked:
        return max(worked, key=lambda pair: _work_s(pair[0]))[1]
    likely = [stage for stage in _below(loop) if stage.kind in _WORKS]
    alone = [stage for stage in likely if is_sequential(stage, None)]
    return next(iter(alone or likely), None)
