"""Training that Python feeds batch by batch: a PyDataset, a generator, or calls of `train_on_batch`."""

from __future__ import annotations

from collections.abc import Iterator

from stoker.scriptprofile.observations import Feed, Loop, Seen
from stoker.scriptprofile.rules.finding import ScriptFinding, gain_of
from stoker.scriptprofile.rules.input_rules import LEAST_WAIT
from stoker.scriptprofile.split import StepSplit, input_share

LEAST_UNPARTED = 0.2
"""Share of the step that is input or Python, where nobody can tell them apart."""

LEAST_CALLS = 0.5
"""Calls of `train_on_batch` for a step, of which a loop is said to consist."""


def feed_findings(loop: Loop, split: StepSplit | None, *, cores: int) -> Iterator[ScriptFinding]:
    """What Python makes for each step of a `fit`, where that is waited for."""
    feed = loop.feed
    if feed is None or split is None:
        return
    wait, unparted = split.input_wait, input_share(split)
    if wait is not None and wait >= LEAST_WAIT:
        share, waits = wait, f"the step waits {wait:.0%} of its time"
    elif wait is None and unparted is not None and unparted >= LEAST_UNPARTED:
        share = unparted
        waits = f"{unparted:.0%} of the step is input and Python, which cannot be told apart here"
    else:
        return
    yield ScriptFinding(
        kind="python_feed",
        place=feed.place or loop.place,
        seen=f"{feed.told()} makes the batches in Python; {waits}",
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


def batch_call_findings(loop: Loop, split: StepSplit | None, seen: Seen) -> Iterator[ScriptFinding]:
    """Loops that call `train_on_batch`, where Python between the calls is much of the step."""
    if split is None or split.python is None or split.python < LEAST_UNPARTED:
        return
    place, count = max(seen.on_batches, key=lambda each: each[1], default=(None, 0))
    if place is None or loop.kind == "fit" or count < LEAST_CALLS * loop.steps:
        return
    yield ScriptFinding(
        kind="train_on_batch",
        place=place,
        seen=f"{count:,} calls of train_on_batch; of a step of {split.step_s * 1e3:.3g} ms Python takes "
        f"{split.python:.0%}",
        why="Each call makes an iterator of its one batch, and waits for the step's metrics.",
        change="model.compile(..., steps_per_execution=32)\nmodel.fit(dataset)  # where a step trains "
        "several models: their train_step in a model of yours, or one @tf.function",
        gain=gain_of(split.python, least=0.5),
        sure="measured",
    )
