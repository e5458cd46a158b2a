"""Findings about steps that wait because Python feeds them batch by batch, or for a reason no other rule finds."""

from __future__ import annotations

from collections.abc import Iterator

from stoker.scriptprofile.facts import WatchedProcess
from stoker.scriptprofile.input_stages import StageCost
from stoker.scriptprofile.loops import DatasetLoop, FitLoop, Loop
from stoker.scriptprofile.observations import NOWHERE, Feed, Stage
from stoker.scriptprofile.rules.finding import ScriptFinding, gain_of
from stoker.scriptprofile.rules.input_rules import MIN_UNMEASURED, MIN_WAIT

MIN_UNPARTED = 0.2
"""Python (with the input, if they cannot be separated) is a finding if it takes at least this share of the step."""

MIN_CALLS = 0.5
"""Minimum calls of `train_on_batch` per step of a loop that trains by such calls."""


def feed_findings(loop: Loop, *, cores: int) -> Iterator[ScriptFinding]:
    """Report the Python object that makes the batches of a `fit`, if training waits for it."""
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
    "Only one thread runs Python at a time, and the training loop needs it too: more cores do not make "
    "the batches faster."
)
_WHY = {
    "PyDataset": "Only one thread of a process runs Python at a time, and the training loop needs it too. "
    "Worker processes run at the same time, but each batch is copied from one to the other.",
    "DataLoader": "The thread that trains copies each batch from PyTorch's tensors to TensorFlow's.",
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
    """Report a loop that calls `train_on_batch` if Python takes much of the step between the calls."""
    split = loop.split
    if split is None or split.python is None or split.python < MIN_UNPARTED:
        return
    place, count = max(process.on_batches, key=lambda each: each[1], default=(None, 0))
    if place is None or isinstance(loop, FitLoop) or count < MIN_CALLS * loop.steps:
        return
    yield ScriptFinding(
        kind="train_on_batch",
        place=place,
        observation=f"{count:,} calls of train_on_batch; Python takes {split.python:.0%} of a step of "
        f"{split.step_s * 1e3:.3g} ms",
        why="Each call creates an iterator for its single batch, and waits for the step's metrics.",
        change="model.compile(..., steps_per_execution=32)\nmodel.fit(dataset)  # if a step trains several "
        "models: put them into one model with its own train_step, or into one @tf.function",
        gain=gain_of(split.python, min_saved=0.5),
        sure="measured",
    )


MIN_BOUND = 0.1
"""A wait for input that no other finding explains is reported if it takes at least this share of the step."""

_FIRST = {
    "batch": ".batch(..., num_parallel_calls=tf.data.AUTOTUNE)",
    "padded_batch": ".bucket_by_sequence_length(...)  # batches of samples of similar length, instead of "
    ".padded_batch(...)",
    "interleave": ".interleave(..., num_parallel_calls=tf.data.AUTOTUNE)",
    "flat_map": ".interleave(..., num_parallel_calls=tf.data.AUTOTUNE)  # if the order may change",
    "TFRecordDataset": "tf.data.TFRecordDataset(files, num_parallel_reads=tf.data.AUTOTUNE)",
    "TextLineDataset": "tf.data.TextLineDataset(files, num_parallel_reads=tf.data.AUTOTUNE)",
    "map": ".batch(...) before .map(...), if the function can process a whole batch",
    "from_tensor_slices": ".batch(...) as the first stage: reading rows one by one has a cost for each row",
}
"""Kind of the most expensive stage -> what to try first."""

_ANYHOW = (
    "num_parallel_calls=tf.data.AUTOTUNE for all stages that map or read, .batch(...) before .map(...), "
    ".prefetch(tf.data.AUTOTUNE) last"
)
_INSIDE = (
    "@tf.function\ndef train(dataset):\n    for batch in dataset:  # inside: no call from Python per batch\n"
    "        strategy.run(step, (batch,))"
)


_SCALED = (
    "tf.io.decode_jpeg(data, ratio=4)  # 2, 4 or 8: decodes a smaller image, which is faster\n"
    "# or store the images once in the size that the model takes"
)


def _decodes_large(stage: Stage) -> bool:
    """Whether a stage is a map that decodes whole images and then resizes them."""
    decodes = any(each.startswith("Decode") for each in stage.operations)
    return decodes and any("Resize" in each for each in stage.operations)


def bound_findings(loop: Loop) -> Iterator[ScriptFinding]:
    """Report a wait for input; called only for a loop whose input has no other finding about speed."""
    split, known = loop.split, loop.input_wait()
    min_wait = MIN_BOUND if known is None or known.measured else MIN_UNMEASURED
    if split is None or known is None or known.share < min_wait:
        return
    if isinstance(loop, FitLoop) and not loop.user_stages():
        return  # `fit` on arrays: the user's code created none of the stages
    wait = known.share
    dearest = _dearest(loop)
    by_hand = bool(loop.model.get("distributed")) and isinstance(loop, DatasetLoop)
    if by_hand:
        seen = "a strategy hands out its batches, with a call from Python for each batch"
    elif dearest is not None:
        seen = f"{dearest.name} takes {dearest.share:.0%} of the input's CPU time"
    else:
        seen = "the cost of its stages is unknown"
    place = loop.place
    if dearest is not None and dearest.stage is not None and dearest.stage.place != NOWHERE:
        place = dearest.stage.place
    yield ScriptFinding(
        kind="input_bound",
        place=place,
        observation=f"{known.text} ({split.step_s * wait * 1e3:.3g} ms); {seen}"
        if known.measured
        else f"{known.text}; {seen}",
        why="The input makes fewer batches per second than the step could process.",
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
