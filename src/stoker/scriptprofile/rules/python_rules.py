"""Python's work between two calls of the compiled step, while the device waits."""

from __future__ import annotations

from collections.abc import Iterator

from stoker.scriptprofile.loops import FitLoop, Loop, StepSplit
from stoker.scriptprofile.observations import BatchHook, Place
from stoker.scriptprofile.rules.finding import ScriptFinding, Sureness, gain_of
from stoker.scriptprofile.rules.origin import argument_line

MIN_PYTHON = 0.2
"""Minimum share of a step that Python must take to be reported."""

MUCH_PYTHON = 0.4
"""If Python takes at least this share of a step, the batch may be too small."""

TINY_STEP_S = 3e-3
"""Maximum duration of a step, seconds, for the advice to run several steps per call: a call costs about 0.3 ms."""

HARDLY_ANY, MUCH_BUSY = 0.05, 0.5
"""A tiny step counts as little more than its call if its MFU is below the first and its U at least the second."""

SMALL_BATCH = 64
"""Maximum number of rows in a batch that is called small."""

LARGER = 4
"""The proposed batch is this many times as large: at best, a step takes no longer than before."""


def _one_step_a_call(loop: Loop, split: StepSplit, python: float) -> Iterator[ScriptFinding]:
    """Report a `fit` whose steps are too short for a call each.

    The finding is `measured` if Python takes much of a step between the calls. It is `possible` if a step computes
    hardly anything.
    """
    one = loop.model.get("steps_per_execution") == 1 and loop.model.get("replicas", 1) == 1
    if not isinstance(loop, FitLoop) or not one or split.step_s >= TINY_STEP_S:
        return
    sure: Sureness = "measured"
    gain = gain_of(python, min_saved=0.5)
    if python >= MIN_PYTHON:
        seen = f"{_share_of(split, python)}, and each call of the train function runs a single step"
        why = "Callbacks, the progress bar and the call itself cost the same, however short a step is."
    elif _is_hardly_any(loop, split):
        seen = f"{_hardly_any(loop, split)}: the rest is the call, and the start of each of its operations"
        why = (
            "A call from Python costs some tenths of a millisecond, however short a step is; here it is "
            "counted as part of the compiled step."
        )
        sure, gain = "possible", (1.0, 3.0)
    else:
        return
    yield ScriptFinding(
        kind="steps_per_execution",
        place=loop.compiled_at,
        observation=seen,
        why=why,
        change="model.compile(..., steps_per_execution=32)",
        gain=gain,
        sure=sure,
    )


def _is_hardly_any(loop: Loop, split: StepSplit) -> bool:
    """Whether a step is so short that it is little more than its call and the start of its operations."""
    is_busy = split.busy is not None and split.busy >= MUCH_BUSY
    is_tiny = split.step_s < TINY_STEP_S and loop.mfu is not None and loop.mfu < HARDLY_ANY
    return is_tiny and is_busy


def _hardly_any(loop: Loop, split: StepSplit) -> str:
    return (
        f"a step takes {split.step_s * 1e3:.3g} ms, and its matrix products are {loop.mfu or 0:.2%} "
        "of what the device could compute in that time"
    )


def _share_of(split: StepSplit, python: float) -> str:
    return f"Python takes {python:.0%} of a step of {split.step_s * 1e3:.3g} ms"


def python_findings(loop: Loop) -> Iterator[ScriptFinding]:
    """Findings about Python's work between the calls of the compiled step."""
    split = loop.split
    if split is None:
        return
    given = loop.hooks if isinstance(loop, FitLoop) else ()
    hooks = [(each, min(1.0, each.step_s / split.step_s)) for each in given]
    for hook, share in hooks:
        if share >= MIN_PYTHON:
            yield _slow_hook(loop, split, hook, share)
    if split.python is None:
        return
    # Larger batches, or several steps per call, do not reduce the cost of the user's own callbacks.
    python = max(0.0, split.python - sum(share for _, share in hooks))
    yield from _one_step_a_call(loop, split, python)
    yield from _small_batch(loop, split, python)


def _small_batch(loop: Loop, split: StepSplit, python: float) -> Iterator[ScriptFinding]:
    if not 0 < loop.rows <= SMALL_BATCH:
        return
    seen, gain = _share_of(split, python), gain_of(python, min_saved=0.3)
    sure: Sureness = "likely"
    if python < MUCH_PYTHON:
        if not _is_hardly_any(loop, split):
            return
        seen, gain, sure = _hardly_any(loop, split), (1.0, float(LARGER)), "possible"
    yield ScriptFinding(
        kind="small_batch",
        place=batch_line(loop),
        observation=f"{seen}, with batches of {loop.rows}",
        why="Between very short steps the device is idle, and starting a very short operation is most of its cost.",
        change=larger_batch(loop),
        gain=gain,
        sure=sure,
    )


def batch_line(loop: Loop) -> Place:
    """Return the line that sets the batch size; if unknown, the line that trains."""
    for stage in loop.stages:
        if stage.kind in ("batch", "padded_batch"):
            # If a library calls `batch`, the user's line calls another function: search it for a keyword `batch_size`.
            call, position = (stage.kind, 0) if stage.in_user_code else ("", None)
            size = stage.arguments.get("batch_size")
            found = argument_line(stage.place, call, "batch_size", position=position, value=size)
            if found is not None:
                return found
    size = loop.model.get("batch_size")
    return argument_line(loop.place, "fit", "batch_size", position=2, value=size) or loop.place


def larger_batch(loop: Loop) -> str:
    """Return the advice to use a larger batch."""
    return (
        f"Use a batch of {loop.rows * LARGER}, and adapt the learning rate: the batch size changes how the "
        "model trains."
    )


def _slow_hook(loop: Loop, split: StepSplit, hook: BatchHook, share: float) -> ScriptFinding:
    return ScriptFinding(
        kind="slow_callback",
        place=hook.place or loop.place,
        observation=f"{hook.hook} of the callback {hook.name} takes {hook.step_s * 1e3:.3g} ms of a step of "
        f"{split.step_s * 1e3:.3g} ms, {share:.0%}",
        why="It runs between two steps, in the thread that trains: the device waits until it has ended.",
        change="Do it every 100 batches (if batch % 100 == 0), in on_epoch_end, or in a thread of its "
        "own. For a callback of Keras, set save_freq or update_freq to a number of batches.",
        gain=gain_of(share, min_saved=0.5),
        sure="measured",
    )
