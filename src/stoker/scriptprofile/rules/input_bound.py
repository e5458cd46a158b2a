"""A step that waits for its input where no rule knows why: what it costs, and what is tried first."""

from __future__ import annotations

from collections.abc import Iterator

from stoker.scriptprofile.observations import NOWHERE, Loop, Stage
from stoker.scriptprofile.rules.finding import ScriptFinding, gain_of
from stoker.scriptprofile.rules.input_rules import LEAST_UNMEASURED
from stoker.scriptprofile.split import StageCost, StepSplit, input_wait, stage_costs

LEAST_BOUND = 0.1
"""Share of the step that waits, from which on it is said also where nothing else is."""

_FIRST = {
    "batch": ".batch(..., num_parallel_calls=tf.data.AUTOTUNE)",
    "padded_batch": ".padded_batch(...) of samples that are as long as each other: "
    ".bucket_by_sequence_length(...)",
    "interleave": ".interleave(..., num_parallel_calls=tf.data.AUTOTUNE)",
    "flat_map": ".interleave(..., num_parallel_calls=tf.data.AUTOTUNE)  # where the order may change",
    "TFRecordDataset": "tf.data.TFRecordDataset(files, num_parallel_reads=tf.data.AUTOTUNE)",
    "TextLineDataset": "tf.data.TextLineDataset(files, num_parallel_reads=tf.data.AUTOTUNE)",
    "map": ".batch(...) before .map(...), where the function can do a whole batch",
    "from_tensor_slices": ".batch(...) as the first stage: rows that are taken one by one cost each",
}
"""Stage that costs most -> what is tried first."""

_ANYHOW = (
    "num_parallel_calls=tf.data.AUTOTUNE on what maps and reads, .batch(...) before .map(...), "
    ".prefetch(tf.data.AUTOTUNE) last"
)
_INSIDE = (
    "@tf.function\ndef train(dataset):\n    for batch in dataset:  # inside: no call of Python for each\n"
    "        strategy.run(step, (batch,))"
)


_SCALED = (
    "tf.io.decode_jpeg(data, ratio=4)  # 2, 4 or 8: decodes at a part of the size that is resized away;\n"
    "# or store the images once at the size that the model takes"
)


def _decodes_large(stage: Stage) -> bool:
    """A map that decodes whole images and then shrinks them."""
    decodes = any(each.startswith("Decode") for each in stage.operations)
    return decodes and any("Resize" in each for each in stage.operations)


def bound_findings(loop: Loop, split: StepSplit | None) -> Iterator[ScriptFinding]:
    """That a loop waits, for one of which nothing else was found."""
    known = input_wait(loop, split)
    least = LEAST_BOUND if known is None or known.measured else LEAST_UNMEASURED
    if split is None or known is None or known.share < least:
        return
    if loop.kind == "fit" and not loop.asked_for():
        return  # of arrays: nothing of it is the user's
    wait = known.share
    dearest = _dearest(loop)
    by_hand = bool(loop.model.get("distributed")) and loop.kind == "dataset"
    if by_hand:
        seen = "a strategy hands its batches out, one call of Python each"
    elif dearest is not None:
        seen = f"{dearest.name} takes {dearest.share:.0%} of the input's CPU time"
    else:
        seen = "what its stages cost is not known"
    place = loop.place
    if dearest is not None and dearest.stage is not None and dearest.stage.place != NOWHERE:
        place = dearest.stage.place
    yield ScriptFinding(
        kind="input_bound",
        place=place,
        seen=f"{known.text} ({split.step_s * wait * 1e3:.3g} ms); {seen}"
        if known.measured
        else f"{known.text}; {seen}",
        why="The input makes fewer batches a second than the step could take.",
        change=_INSIDE if by_hand else _change(dearest),
        gain=gain_of(wait),
        sure="possible",
    )


def _dearest(loop: Loop) -> StageCost | None:
    asked = [cost for cost in stage_costs(loop) if cost.stage is not None]
    return max(asked, key=lambda cost: cost.share, default=None)


def _change(dearest: StageCost | None) -> str:
    stage = None if dearest is None else dearest.stage
    if stage is not None and _decodes_large(stage):
        return f"{_SCALED}\n# and {_ANYHOW}"
    first = None if stage is None else _FIRST.get(stage.kind)
    if first is None:
        return _ANYHOW
    return f"{first}\n# and {_ANYHOW}"
