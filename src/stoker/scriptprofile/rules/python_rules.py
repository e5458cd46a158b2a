"""Python's work between two calls of the compiled step, while the device waits."""

from __future__ import annotations

from collections.abc import Iterator

from stoker.scriptprofile.loops import FitLoop, Loop, StepSplit
from stoker.scriptprofile.observations import BatchHook, Place
from stoker.scriptprofile.rules.finding import ScriptFinding, Sureness, gain_of
from stoker.scriptprofile.rules.origin import argument_line

MIN_PYTHON = 0.2
"""Share of a step that Python takes; with less, nothing is reported."""

MUCH_PYTHON = 0.4
"""Share of a step that Python takes, from which on a batch counts as too small."""

TINY_STEP_S = 3e-3
"""Several steps of this duration in one call cost less than in as many calls, of some 0.3 ms each."""

HARDLY_ANY, MUCH_BUSY = 0.05, 0.5
"""If MFU is below and U above these, a tiny step counts as little more than its call."""

SMALL_BATCH = 64
"""Rows: a larger batch is not called small."""

LARGER = 4
"""Factor of the proposed batch: at best the step takes no longer."""


def _one_step_a_call(loop: Loop, split: StepSplit, python: float) -> Iterator[ScriptFinding]:
    """Steps of `fit` that are too short for one call each.

    This is measured if Python takes much of them between the calls, and possible if they are
    hardly any arithmetic.
    """
    one = loop.model.get("steps_per_execution") == 1 and loop.model.get("replicas", 1) == 1
    if not isinstance(loop, FitLoop) or not one or split.step_s >= TINY_STEP_S:
        return
    sure: Sureness = "measured"
    gain = gain_of(python, least=0.5)
    if python >= MIN_PYTHON:
        seen = f"{_share_of(split, python)}, and each call of the compiled step does one"
        why = "Callbacks, the progress bar and the call itself cost the same however little a step does."
    elif _is_hardly_any(loop, split):
        seen = f"{_hardly_any(loop, split)}: calling it, and starting each of its operations, is the rest"
        why = (
            "A call from Python costs some tenths of a millisecond however little a step does; it is "
            "counted with the compiled step here."
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
    """Whether a tiny step is little more than its call and the launches of its operations."""
    is_busy = split.busy is not None and split.busy >= MUCH_BUSY
    is_tiny = split.step_s < TINY_STEP_S and loop.mfu is not None and loop.mfu < HARDLY_ANY
    return is_tiny and is_busy


def _hardly_any(loop: Loop, split: StepSplit) -> str:
    return (
        f"a step takes {split.step_s * 1e3:.3g} ms, and its products are {loop.mfu or 0:.2%} "
        "of what the device could do in that time"
    )


def _share_of(split: StepSplit, python: float) -> str:
    return f"of a step of {split.step_s * 1e3:.3g} ms Python takes {python:.0%}"


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
    # A larger batch, or several steps per call, do not help against the cost of the user's own callback.
    python = max(0.0, split.python - sum(share for _, share in hooks))
    yield from _one_step_a_call(loop, split, python)
    yield from _small_batch(loop, split, python)


def _small_batch(loop: Loop, split: StepSplit, python: float) -> Iterator[ScriptFinding]:
    if not 0 < loop.rows <= SMALL_BATCH:
        return
    seen, gain = _share_of(split, python), gain_of(python, least=0.3)
    sure: Sureness = "likely"
    if python < MUCH_PYTHON:
        if not _is_hardly_any(loop, split):
            return
        seen, gain, sure = _hardly_any(loop, split), (1.0, float(LARGER)), "possible"
    yield ScriptFinding(
        kind="small_batch",
        place=batch_line(loop),
        observation=f"{seen}, with batches of {loop.rows}",
        why="The device is idle between steps that are too short for it, or starts operations that are.",
        change=larger_batch(loop),
        gain=gain,
        sure=sure,
    )


def batch_line(loop: Loop) -> Place:
    """The line that sets the batch size; else the line that trains."""
    for stage in loop.stages:
        if stage.kind in ("batch", "padded_batch"):
            # The call of another library got it by name.
            call, position = (stage.kind, 0) if stage.in_user_code else ("", None)
            size = stage.arguments.get("batch_size")
            found = argument_line(stage.place, call, "batch_size", position=position, value=size)
            if found is not None:
                return found
    size = loop.model.get("batch_size")
    return argument_line(loop.place, "fit", "batch_size", position=2, value=size) or loop.place


def larger_batch(loop: Loop) -> str:
    """The replacement for a small batch."""
    return (
        f"A batch of {loop.rows * LARGER} (and a learning rate to suit it: another batch is another "
        "training)."
    )


def _slow_hook(loop: Loop, split: StepSplit, hook: BatchHook, share: float) -> ScriptFinding:
    return ScriptFinding(
        kind="slow_callback",
        place=hook.place or loop.place,
        observation=f"{hook.hook} of the callback {hook.name} takes {hook.step_s * 1e3:.3g} ms of a step of "
        f"{split.step_s * 1e3:.3g} ms, {share:.0%}",
        why="It runs between two steps, in the thread that trains: the device waits until it has ended.",
        change="Do it every 100 batches (if batch % 100 == 0), in on_epoch_end, or in a thread of its "
        "own; of Keras's own callbacks, set save_freq or update_freq to a number of batches.",
        gain=gain_of(share, least=0.5),
        sure="measured",
    )
