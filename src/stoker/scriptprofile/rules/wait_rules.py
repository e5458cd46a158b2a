"""Steps that wait for their input: Python feeds them batch by batch, or no other rule explains the wait."""

from __future__ import annotations

from collections.abc import Iterator

from stoker.scriptprofile.facts import WatchedProcess
from stoker.scriptprofile.input_stages import StageCost
from stoker.scriptprofile.loops import DatasetLoop, FitLoop, Loop
from stoker.scriptprofile.observations import NOWHERE, Feed, Stage
from stoker.scriptprofile.rules.finding import ScriptFinding, gain_of
from stoker.scriptprofile.rules.input_rules import MIN_UNMEASURED, MIN_WAIT

MIN_UNPARTED = 0.2
"""Share of the step that is input or Python, if the two cannot be separated."""

MIN_CALLS = 0.5
"""Calls of `train_on_batch` per step, from which on a loop consists of them."""


def feed_findings(loop: Loop, *, cores: int) -> Iterator[ScriptFinding]:
    """The work of Python for each step of a `fit`, if training waits for it."""
    feed = loop.feed if isinstance(loop, FitLoop) else None
    if feed is None or loop.split is None:
        return
    wait, unparted = loop.wait, loop.split.input_share()
    if wait is not None and wait >= MIN_WAIT:
        share, waits = wait, f"the step waits {wait:.0%} of its time"
    elif wait is None and unparted is not None and unparted >= MIN_UNPARTED:
        share = unparted
        waits = f"{unparted:.0%} of the step is input and Python, which cannot be separated here"
    else:
        return
    yield ScriptFinding(
        kind="python_feed",
        place=feed.place or loop.place,
        observation=f"{feed.label()} makes the batches in Python; {waits}",
        why=_WHY.get(feed.kind, _WHY_ONE_THREAD),
        change=_change(feed, cores),
        gain=gain_of(share),
        sure="likely",
    )


_WHY_ONE_THREAD = (
    "Each batch is made by one Python thread, which takes turns with the training loop: no number of "
    "cores makes it faster."
)
_WHY = {
    "PyDataset": "Threads of Python take turns with each other and with the training loop; processes "
    "do not, but each of their batches is copied between them.",
    "DataLoader": "Its batches are copied from PyTorch's tensors to TensorFlow's, by the thread that "
    "trains.",
}
_TF_DATA = (
    "tf.data.Dataset.from_tensor_slices(paths).map(load, num_parallel_calls=tf.data.AUTOTUNE)"
    ".batch(...)  # load: tf.io.read_file, tf.io.decode_jpeg, ..."
)


def _change(feed: Feed, cores: int) -> str:
    if feed.kind == "PyDataset" and not feed.processes:
        return (
            f"super().__init__(workers={max(2, cores, feed.workers)}, use_multiprocessing=True, max_queue_size=16)"
            f"  # and the script under if __name__ == '__main__'\n# or, without Python: {_TF_DATA}"
        )
    return _TF_DATA


def batch_call_findings(loop: Loop, process: WatchedProcess) -> Iterator[ScriptFinding]:
    """Loops that call `train_on_batch`, where Python between the calls is much of the step."""
    split = loop.split
    if split is None or split.python is None or split.python < MIN_UNPARTED:
        return
    place, count = max(process.on_batches, key=lambda each: each[1], default=(None, 0))
    if place is None or isinstance(loop, FitLoop) or count < MIN_CALLS * loop.steps:
        return
    yield ScriptFinding(
        kind="train_on_batch",
        place=place,
        observation=f"{count:,} calls of train_on_batch; of a step of {split.step_s * 1e3:.3g} ms Python takes "
        f"{split.python:.0%}",
        why="Each call makes an iterator of its one batch, and waits for the step's metrics.",
        change="model.compile(..., steps_per_execution=32)\nmodel.fit(dataset)  # where a step trains "
        "several models: their train_step in a model of yours, or one @tf.function",
        gain=gain_of(split.python, least=0.5),
        sure="measured",
    )


MIN_BOUND = 0.1
"""Share of the step spent waiting, from which on it is a finding without another explanation."""

_FIRST = {
    "batch": ".batch(..., num_parallel_calls=tf.data.AUTOTUNE)",
    "padded_batch": ".padded_batch(...) of samples that are as long as each other: "
    ".bucket_by_sequence_length(...)",
    "interleave": ".interleave(..., num_parallel_calls=tf.data.AUTOTUNE)",
    "flat_map": ".interleave(..., num_parallel_calls=tf.data.AUTOTUNE)  # where the order may change",
    "TFRecordDataset": "tf.data.TFRecordDataset(files, num_parallel_reads=tf.data.AUTOTUNE)",
    "TextLineDataset": "tf.data.TextLineDataset(files, num_parallel_reads=tf.data.AUTOTUNE)",
    "map": ".batch(...) before .map(...), where the function can do a whole batch",
    "from_tensor_slices": ".batch(...) as the first stage: rows that are read one by one cost each",
}
"""The most expensive stage -> what to try first."""

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


def bound_findings(loop: Loop) -> Iterator[ScriptFinding]:
    """A wait for input, for a loop whose input has no other finding."""
    split, known = loop.split, loop.input_wait()
    least = MIN_BOUND if known is None or known.measured else MIN_UNMEASURED
    if split is None or known is None or known.share < least:
        return
    if isinstance(loop, FitLoop) and not loop.user_stages():
        return  # for arrays: none of its stages is the user's
    wait = known.share
    dearest = _dearest(loop)
    by_hand = bool(loop.model.get("distributed")) and isinstance(loop, DatasetLoop)
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
        observation=f"{known.text} ({split.step_s * wait * 1e3:.3g} ms); {seen}"
        if known.measured
        else f"{known.text}; {seen}",
        why="The input makes fewer batches a second than the step could take.",
        change=_INSIDE if by_hand else _first_tries(dearest),
        gain=gain_of(wait),
        sure="possible",
    )


def _dearest(loop: Loop) -> StageCost | None:
    known = [cost for cost in loop.costs if cost.stage is not None]
    return max(known, key=lambda cost: cost.share, default=None)


def _first_tries(dearest: StageCost | None) -> str:
    stage = None if dearest is None else dearest.stage
    if stage is not None and _decodes_large(stage):
        return f"{_SCALED}\n# and {_ANYHOW}"
    first = None if stage is None else _FIRST.get(stage.kind)
    if first is None:
        return _ANYHOW
    return f"{first}\n# and {_ANYHOW}"
