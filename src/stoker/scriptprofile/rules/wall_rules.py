"""The wall time of a whole script: its parts, and findings about parts that are not training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from stoker.scriptprofile.facts import WatchedProcess
from stoker.scriptprofile.input_stages import stages_of
from stoker.scriptprofile.loops import FitLoop, Loop
from stoker.scriptprofile.observations import FirstPass, Stage, WallPart
from stoker.scriptprofile.rules.finding import ScriptFinding
from stoker.scriptprofile.rules.input_rules import is_sequential, nodes_of

MIN_PART = 0.10
"""A part is a finding if it takes at least this share of the script's time, not counting imports."""

MIN_WALL_S, MIN_CPU_S, LONG_S = 2.0, 1.0, 10.0
"""A part that is a finding must also take MIN_WALL_S of wall time, and either MIN_CPU_S of CPU time or LONG_S of wall
time: other programs on the machine make short parts long."""

MIN_LOOP = 0.05
"""A loop gets advice about speed if it takes at least this share of the script's time, not counting imports."""

MANY_CALLS = 20
"""Minimum number of calls of `predict` for the advice to make fewer calls: their own cost then dominates."""

NAMES = {
    "imports": "imports",
    "training": "training",
    "first_pass": "the first pass, which fills a cache",
    "validation": "validation",
    "evaluate": "evaluate",
    "predict": "predict",
    "callbacks": "callbacks between epochs",
    "saving": "saving",
    "measuring": "measuring by Stoker",
    "rest": "the script's own code and waiting",
}
"""Part -> label for the user."""


def wall_time(process: WatchedProcess) -> Mapping[str, float]:
    """Return part of the process's wall time -> seconds, largest first; empty if unknown.

    The sum of all parts is the time from the process's start to its last report.
    """
    if process.since_start_s <= 0:
        return {}
    found: dict[str, float] = {}
    for part in process.wall_parts:
        name = "training" if part.kind == "fit" else part.kind
        found[name] = found.get(name, 0.0) + max(0.0, part.wall_s)
    for loop in process.loops:
        found["measuring"] = found.get("measuring", 0.0) + loop.measuring_s
        if isinstance(loop, FitLoop):
            found["training"] = max(0.0, found.get("training", 0.0) - loop.measuring_s)
        else:
            found["training"] = found.get("training", 0.0) + loop.first_s + loop.period_s
        filled_s = min(filling_s(loop), found["training"])
        if filled_s > 0:
            found["training"] -= filled_s
            found["first_pass"] = found.get("first_pass", 0.0) + filled_s
    found["rest"] = max(0.0, process.since_start_s - sum(found.values()))
    return dict(sorted(found.items(), key=lambda each: -each[1]))


def share_of_script(loop: Loop, process: WatchedProcess) -> float:
    """Return a loop's share of the script's time, not counting imports, in [0, 1]; 1 if unknown."""
    parts = wall_time(process)
    base_s = sum(parts.values()) - parts.get("imports", 0.0)
    fits = sum(part.wall_s for part in process.wall_parts if part.place == loop.place)
    whole_s = fits if isinstance(loop, FitLoop) else loop.first_s + loop.period_s
    return min(1.0, whole_s / base_s) if base_s > 0 else 1.0


def wall_findings(process: WatchedProcess) -> Iterator[ScriptFinding]:
    """Return the findings about large parts of a script's time that are not training."""
    parts = wall_time(process)
    base_s = sum(parts.values()) - parts.get("imports", 0.0)
    for part in process.wall_parts:
        share = part.wall_s / base_s if base_s > 0 else 0.0
        is_long = part.cpu_s >= MIN_CPU_S or part.wall_s >= LONG_S
        if part.kind not in _SAID or share < MIN_PART or part.wall_s < MIN_WALL_S or not is_long:
            continue
        what, why, change = _SAID[part.kind]
        if part.kind == "predict" and part.calls >= MANY_CALLS:
            why, change = _MANY
        times = "once" if part.calls == 1 else f"in {part.calls:,} calls"
        yield ScriptFinding(
            kind=f"slow_{part.kind}",
            place=part.place,
            observation=f"{what} takes {share:.0%} of the script's time without imports "
            f"({part.wall_s:.3g} s {times})",
            why=why,
            change=change,
            gain=(1.0, min(20.0, 1.0 / max(0.05, 1.0 - share))),
            sure="measured",
        )
    for loop in process.loops:
        yield from _slow_first_pass(loop, base_s)


_SAID = {
    "validation": (
        "validation",
        "No step is trained during this time.",
        "Cache its data, use only a part of the data (validation_steps), or validate less often (validation_freq).",
    ),
    "evaluate": (
        "evaluate",
        "It runs its input pipeline again, without the caches that `fit` may have.",
        "Use a larger batch_size, and cache the results of its dataset.",
    ),
    "predict": (
        "predict",
        "It runs its input pipeline again, and gathers all outputs on the host.",
        "Use a larger batch_size, or predict less often.",
    ),
    "callbacks": (
        "the work of callbacks between epochs",
        "No step is trained during this time.",
        "Do this work less often (if epoch % 5 == 0), on less data, or after the training.",
    ),
    "saving": (
        "saving",
        "No step is trained during this time.",
        "Save less often, or only weights: ModelCheckpoint(save_best_only=True, save_weights_only=True)",
    ),
}
"""Kind of a part -> its name, why it costs time, and the advice."""

_MANY = (
    "Each call builds a dataset and an iterator, which costs milliseconds, however few rows it predicts.",
    "Collect the rows and call model.predict(rows) once; for a few rows, call model(rows, training=False).",
)


def shown_parts(process: WatchedProcess) -> list[tuple[str, float]]:
    """Return label and share of each part, for the user; parts below one percent are left out."""
    parts = wall_time(process)
    whole_s = sum(parts.values())
    shares = [(NAMES.get(name, name), value / whole_s) for name, value in parts.items() if whole_s]
    return [(name, share) for name, share in shares if share >= 0.01]


def parts_json(process: WatchedProcess) -> list[dict[str, object]]:
    """Return the wall time of each line, largest first, for profile.json."""
    return [_json(part) for part in sorted(process.wall_parts, key=lambda each: -each.wall_s)]


def _json(part: WallPart) -> dict[str, object]:
    return {
        "kind": part.kind,
        "file": part.place.file,
        "line": part.place.line,
        "wall_s": part.wall_s,
        "cpu_s": part.cpu_s,
        "calls": part.calls,
    }


CACHES = ("cache", "snapshot")
"""Kinds of stages that keep the results of the first pass."""

_WORKS = ("map", "from_generator", "interleave", "flat_map", "filter")
"""Kinds of stages among which the most expensive one is guessed if TensorFlow recorded no figures."""


def filling_s(loop: Loop) -> float:
    """Return how long the first pass worked to fill its cache, seconds; 0 if it filled none."""
    first = loop.first_pass
    if first is None or not _below_cache(loop):
        return 0.0
    work = _work_below_cache(loop, first)
    if work and first.nodes_s > 0:
        # The first pass also traces and compiles, so only the time that its stages worked counts.
        return min(first.longer_s, first.wall_s * sum(work_s for _, work_s in work) / first.nodes_s)
    ran = stages_of(first.nodes, loop.stages)
    # If the cache itself ran but nothing below it, an earlier loop had already filled it.
    is_full = any(stage is not None and stage.kind in CACHES for stage in ran)
    return 0.0 if is_full else first.longer_s


def _slow_first_pass(loop: Loop, base_s: float) -> Iterator[ScriptFinding]:
    """Report a long first pass, at the line of its most expensive stage.

    Args:
        loop: A training loop.
        base_s: The script's time, not counting imports, seconds.
    """
    first, filled_s = loop.first_pass, filling_s(loop)
    if first is None or filled_s < MIN_PART * base_s:
        return
    # Without other programs on the machine, it would have taken only this part of the time.
    if filled_s * (1.0 - first.away) < MIN_WALL_S:
        return
    work = _work_below_cache(loop, first)
    stage = max(work, key=lambda each: each[1])[0] if work else _likely_dearest(loop)
    if stage is None:
        return
    share = saved = min(1.0, filled_s / base_s)
    ran = nodes_of(first.nodes, loop.stages, "map").get(stage.place)
    change = _KEEP
    if stage.python_calls or stage.kind == "from_generator":
        change = f"Use TensorFlow's operations in a parallel map instead; and {_KEEP}"
    elif stage.kind == "map" and is_sequential(stage, ran):
        saved = share * (1.0 - 1.0 / max(1, loop.cores))
        change = f".map(..., num_parallel_calls=tf.data.AUTOTUNE)  # and {_KEEP}"
    what = "the generator" if stage.kind == "from_generator" else f"this {stage.kind}"
    yield ScriptFinding(
        kind="slow_first_pass",
        place=stage.place,
        observation=f"{what} fills the cache in the first of {loop.passes} passes, which takes "
        f"{filled_s:.3g} s longer than a later pass, {share:.0%} of the script's time without imports",
        why="Training waits for it once in each run of the script; the cache only helps later passes.",
        change=change,
        gain=(1.0, 1.0 / max(0.05, 1.0 - saved)),
        sure="measured" if work else "likely",
    )


_KEEP = ".cache(a file name) keeps the results on disk, for the next run of the script"


def _below_cache(loop: Loop) -> list[Stage]:
    """The user's stages below the cache, last stage first."""
    cached = [number for number, stage in enumerate(loop.stages) if stage.kind in CACHES]
    below = loop.stages[cached[-1] + 1 :] if cached else ()
    return [stage for stage in below if stage.in_user_code]


def _work_below_cache(loop: Loop, first: FirstPass) -> list[tuple[Stage, float]]:
    """The user's stages that ran below the cache, and how long each worked: CPU time / number of parallel calls."""
    below = _below_cache(loop)
    pairs = zip(first.nodes, stages_of(first.nodes, loop.stages), strict=True)
    return [
        (stage, node.cpu_s / max(1.0, node.parameters.get("parallelism", (1.0, False))[0]))
        for node, stage in pairs
        if stage in below
    ]


def _likely_dearest(loop: Loop) -> Stage | None:
    """The stage that is probably the most expensive one; used if TensorFlow recorded no figures."""
    likely = [stage for stage in _below_cache(loop) if stage.kind in _WORKS]
    alone = [stage for stage in likely if is_sequential(stage, None)]
    return next(iter(alone or likely), None)
