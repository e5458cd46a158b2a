"""Findings about a loop's input: lines of its dataset that make training wait, or waste memory.

Each rule reads the stages of the dataset, starting with the last one (nearest to the model), and the cost of each
stage: its share of the input's CPU time. `input_findings` runs the rules.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from stoker.scriptprofile.input_stages import stages_of
from stoker.scriptprofile.loops import EpochStarts, FitLoop, Loop
from stoker.scriptprofile.observations import Node, Place, Stage
from stoker.scriptprofile.rules.finding import ScriptFinding, Sureness, gain_of
from stoker.scriptprofile.rules.origin import argument_line, array_line

MIN_WAIT = 0.05
"""Minimum share of the step spent waiting for input: a smaller wait does not matter, and noise is as large."""

MIN_UNMEASURED = 0.2
"""The same minimum if W is unknown: the share then includes Keras and Python."""

MIN_SHARE = 0.2
"""Minimum share of the input's CPU time for which a stage is reported."""

MIN_START, MIN_START_S = 0.1, 0.25
"""Minimum waits before epochs that are reported: their share of the training's time, and the seconds of each."""

LARGE_START = 0.25
"""Waits before epochs with at least this share of the training's time are reported even if each is short."""

MIN_WORK = 0.3
"""The input's work can explain a wait before an epoch if the work of a whole pass takes at least this share of it."""

BATCHES = {"batch", "padded_batch", "ragged_batch"}

MAX_MEMORY = 0.25
"""Maximum share of the machine's memory for a single buffer or cache."""

NAMED = 3
"""Maximum number of operations that a message names."""

ROW_WISE = {
    "ParseSingleExample": "tf.io.parse_example(serialized, features)",
    "ParseExample": "tf.io.parse_example(serialized, features)",
    "ParseExampleV2": "tf.io.parse_example(serialized, features)",
    "ParseSingleSequenceExample": "tf.io.parse_sequence_example(serialized, ...)",
    "DecodeCSV": "tf.io.decode_csv(lines, ...)",
    "DecodeRaw": "tf.io.decode_raw(bytes, ...)",
    "StringToNumber": "tf.strings.to_number(texts)",
    "StringSplitV2": "tf.strings.split(texts)",
    "RegexReplace": "tf.strings.regex_replace(texts, ...)",
    "StaticRegexReplace": "tf.strings.regex_replace(texts, ...)",
    "StringLower": "tf.strings.lower(texts)",
    "StringToHashBucketFast": "tf.strings.to_hash_bucket_fast(texts, ...)",
    "LookupTableFindV2": "table.lookup(ids)",
    "OneHot": "tf.one_hot(ids, ...)",
    "Cast": "tf.cast(rows, ...)",
}
"""Operation that a map runs for each row -> call that does the same for a whole batch."""

_ROW_ONLY = re.compile(
    r"Decode(Jpeg|Png|Image|Bmp|Gif|AndCrop|Wav)|Resize|ReadFile|PyFunc|^While$|Crop|Audio|^If$"
)
"""Operations that cannot be batched, or whose own work is expensive."""

MIN_BATCH = 2
"""Minimum number of rows per batch: with fewer, a map that works row by row is not reported."""

_ENDLESS = (
    ".cache() before any random stage, or .repeat() with steps_per_epoch: one iterator then serves all "
    "epochs"
)
_ENDLESS_ARRAYS = (
    "dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x)).repeat().batch(...)\n"
    "model.fit(dataset, steps_per_epoch=...)  # one iterator for all epochs; or train fewer, longer epochs"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """The machine on which the script ran."""

    cores: int
    memory_bytes: int
    gpus: int = 0


def input_findings(loop: Loop, machine: Machine) -> Iterator[ScriptFinding]:
    """Return the findings about a loop's dataset; findings about speed only if training waits for the dataset."""
    yield from _shuffle_memory(loop, machine)
    yield from _float64(loop)
    starts = loop.epoch_starts if isinstance(loop, FitLoop) and _matters(loop) else None
    if starts is not None:
        yield _slow_start(loop, starts)
    waiting = _waiting(loop, starts)
    if waiting is None:
        return
    generator = list(_generator(loop, waiting))
    yield from generator
    yield from _maps(loop, waiting, machine)
    yield from _row_by_row(loop, waiting)
    if not generator:
        yield from _uncached(loop, waiting, machine)
    if loop.wait is not None and loop.wait >= MIN_WAIT:
        yield from _prefetch(loop, loop.wait)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Waiting:
    """How long training waits for its input."""

    share: float
    """Share of the training's time that it waits, in [0, 1]."""

    text: str
    """The share as a clause."""


def _waiting(loop: Loop, starts: EpochStarts | None) -> _Waiting | None:
    """The waits of a loop's steps, plus the waits before its epochs if given; None if they do not matter."""
    known = loop.input_wait()
    wait = 0.0 if known is None else known.share
    if starts is None:
        min_wait = MIN_WAIT if known is None or known.measured else MIN_UNMEASURED
        if known is None or wait < min_wait:
            return None
        return _Waiting(share=wait, text=known.text)
    # `wait` is a share of the steps' time, which does not include the waits before epochs.
    share = starts.share + (1.0 - starts.share) * wait
    return _Waiting(share=share, text=f"training waits {share:.0%} of its time")


def _matters(loop: FitLoop) -> bool:
    """Whether the waits before epochs are worth a finding."""
    starts = loop.epoch_starts
    if starts is None or loop.feed is not None or starts.share < MIN_START:
        return False
    # A single wait may have any cause. Short waits, and waits in which Keras builds its own dataset of arrays
    # again, need more evidence.
    often = len(loop.starts) > 1 and starts.each_s >= MIN_START_S and bool(loop.user_stages())
    often |= len(loop.starts) > 2 and starts.share >= LARGE_START
    # If the steps wait longer in total, that must be fixed first.
    is_larger = starts.share >= (1.0 - starts.share) * (loop.wait or 0.0)
    return often and is_larger and _may_be_the_input(loop, starts)


def _may_be_the_input(loop: Loop, starts: EpochStarts) -> bool:
    """Whether the input's work before the first batch of an epoch, at most a whole pass, can take this long.

    Otherwise the wait has another cause, such as a busy machine or a pause of tf.data's tuner at the end of a pass.
    """
    rows, ran = loop.batches_a_pass * loop.rows, stages_of(loop.nodes, loop.stages)
    if not loop.costs or not rows or any(stage not in ran for stage in loop.user_stages()):
        # Part of the input's work is unknown: e.g. a shuffle had already read everything below it.
        return True
    return rows * sum(cost.cpu_s_per_sample for cost in loop.costs) >= starts.each_s * MIN_WORK


def _slow_start(loop: Loop, starts: EpochStarts) -> ScriptFinding:
    mine = loop.user_stages()
    shuffles = [stage for stage in mine if stage.kind == "shuffle" and stage.in_user_code]
    stage = next(iter(shuffles or mine), None)
    filled, change = "the input starts again", _ENDLESS
    if shuffles:
        filled = "the shuffle buffer is filled again"
        change = ".cache() before .shuffle(...), or shuffle file names or indices, and read the data after that"
    elif not mine:
        filled, change = "Keras creates the iterator over the arrays again", _ENDLESS_ARRAYS
    return ScriptFinding(
        kind="slow_epoch_start",
        place=loop.place if stage is None else stage.place,
        observation=f"each epoch except the first waits {starts.each_s:.2g} s before its first step, "
        f"{starts.share:.0%} of the training's time: {filled}",
        why="Training waits until the first batch is ready, and the input repeats work that it already did "
        "for the previous epoch.",
        change=change,
        gain=gain_of(starts.share),
        sure="measured",
    )


def map_share(loop: Loop, stage: Stage) -> float | None:
    """A map's share of the input's CPU time, in [0, 1]; None if TensorFlow did not record its time."""
    shares = [cost.share for cost in loop.costs if cost.stage is stage]
    return sum(shares) if shares else None


def _costly_maps(loop: Loop) -> Iterator[tuple[int, Stage, float | None]]:
    """Yield the user's maps whose share of the input's CPU time is large or unknown: index, stage, share."""
    for number, stage in enumerate(loop.stages):
        share = map_share(loop, stage)
        if stage.kind == "map" and stage.in_user_code and (share is None or share >= MIN_SHARE):
            yield number, stage, share


def _prefetch(loop: Loop, wait: float) -> Iterator[ScriptFinding]:
    mine = [stage for stage in loop.stages if stage.in_user_code]
    if not mine or any(stage.kind == "prefetch" for stage in loop.stages):
        return
    if any(runs_ahead(node) for node in loop.nodes[:3]) or loop.model.get("distributed"):
        return
    last = mine[0]
    yield ScriptFinding(
        kind="missing_prefetch",
        place=last.place,
        observation=f"the step waits {wait:.0%} of its time, and no batch is prepared while a step computes",
        why="Without prefetch, the input is idle while the step computes, and the step is idle while "
        "the input works.",
        change="dataset = dataset.prefetch(tf.data.AUTOTUNE)",
        # At best, the shorter of the two runs completely during the longer one.
        gain=(1.0, 1.0 / max(wait, 1.0 - wait)),
        sure="measured" if loop.nodes else "likely",
    )


def runs_ahead(node: Node) -> bool:
    """Whether a stage produces elements before they are requested."""
    return node.name.startswith(("Prefetch", "ParallelMap", "MapAndBatch", "ParallelBatch"))


def _maps(loop: Loop, waiting: _Waiting, machine: Machine) -> Iterator[ScriptFinding]:
    ran = nodes_of(loop.nodes, loop.stages, "map")
    for _, stage, share in _costly_maps(loop):
        if is_cached(loop, stage):
            continue
        if stage.python_calls:
            yield _python_map(stage, waiting)
        elif is_sequential(stage, ran.get(stage.place)):
            parallel = waiting.share * (1.0 - 1.0 / machine.cores) if machine.cores > 1 else 0.0
            part = "" if share is None else f" and takes {share:.0%} of the input's CPU time"
            yield ScriptFinding(
                kind="sequential_map",
                place=stage.place,
                observation=f"this map processes one element at a time{part}; {waiting.text}",
                why="One core prepares the data while the other cores are idle.",
                change=".map(..., num_parallel_calls=tf.data.AUTOTUNE)",
                gain=gain_of(parallel),
                # Less sure if TensorFlow recorded other stages but not this one: a shuffle above it had already
                # read everything.
                sure=_sure(share, loop),
            )


def _row_by_row(loop: Loop, waiting: _Waiting) -> Iterator[ScriptFinding]:
    """Report a map that precedes the batching and runs, for each row, operations that could run on a whole batch."""
    for number, stage, share in _costly_maps(loop):
        batched = any(each.kind in BATCHES for each in loop.stages[:number])
        named = [each for each in ROW_WISE if each in stage.operations]
        alone = any(_ROW_ONLY.search(each) for each in stage.operations)
        # After the batch, random numbers would be drawn once per batch instead of once per row.
        alone |= stage.random or is_cached(loop, stage)
        if not batched or not named or alone or loop.rows < MIN_BATCH:
            continue
        part = "" if share is None else f", {share:.0%} of the input's CPU time"
        yield ScriptFinding(
            kind="row_by_row",
            place=stage.place,
            observation=f"this map runs {', '.join(named[:NAMED])} for one row at a time{part}; {waiting.text}",
            why="A call for a single row costs far more than the work on the row; one call for a batch shares "
            "this cost.",
            change=f".batch(...).map(...)  # batch first, then {ROW_WISE[named[0]]}",
            gain=gain_of(waiting.share * (1.0 if share is None else share)),
            sure="likely",
        )


def nodes_of(nodes: Sequence[Node], stages: Sequence[Stage], kind: str) -> dict[Place, Node]:
    """Return line -> the stage that TensorFlow ran for it, for all stages of a kind."""
    pairs = zip(nodes, stages_of(nodes, stages), strict=True)
    return {stage.place: node for node, stage in pairs if stage and stage.kind == kind}


def is_sequential(stage: Stage, node: Node | None) -> bool:
    """Whether a map processes one element at a time: the script writes it so, and TensorFlow runs it so."""
    if stage.arguments.get("num_parallel_calls") is not None:
        return False
    if node is None or node.name == "Map":
        return True
    # TensorFlow has made the map parallel, but maybe with a single call at a time.
    calls, tuned = node.parameters.get("parallelism", (1.0, False))
    return not tuned and calls <= 1


def _sure(share: float | None, loop: Loop) -> Sureness:
    if share is not None:
        return "measured"
    return "possible" if loop.nodes else "likely"


def is_cached(loop: Loop, stage: Stage) -> bool:
    """Whether a stage's results were read from a cache in later passes."""
    above = loop.stages[: loop.stages.index(stage)]
    return loop.passes > 1 and any(each.kind in ("cache", "snapshot") for each in above)


def _python_map(stage: Stage, waiting: _Waiting) -> ScriptFinding:
    # In code converted by AutoGraph, the nearest known line of the user is that of the map, so it is left out.
    others = [str(place) for place in stage.python_calls if place != stage.place]
    at = f" in {', '.join(others[:3])}" if others else ""
    return ScriptFinding(
        kind="python_map",
        place=stage.place,
        observation=f"each element calls Python (tf.py_function or tf.numpy_function{at}); {waiting.text}",
        why="Only one thread runs Python at a time: more parallel calls do not help, and your training loop "
        "waits while these calls run.",
        change="Write the function with TensorFlow's operations (tf.io, tf.image, tf.strings), or "
        "batch before the map, so that one call processes a whole batch.",
        gain=gain_of(waiting.share),
        sure="likely",
    )


def given_by_generator(loop: Loop, number: int) -> tuple[str, str]:
    """Return the kind of a finding about a generator (stage `number`), and what it gives: "sample" or "batch"."""
    if any(each.kind in BATCHES for each in loop.stages[:number]):
        return "generator_rows", "sample"
    return "generator_batches", "batch"


def _generator(loop: Loop, waiting: _Waiting) -> Iterator[ScriptFinding]:
    for number, stage in enumerate(loop.stages):
        if stage.kind != "from_generator" or not stage.in_user_code:
            continue
        kind, given = given_by_generator(loop, number)
        yield ScriptFinding(
            kind=kind,
            place=stage.place,
            observation=f"a Python generator gives one {given} at a time; {waiting.text}",
            why="Only one thread runs Python at a time, and your training loop needs it too: more cores do "
            "not help.",
            change="dataset = tf.data.Dataset.from_tensor_slices(paths_or_arrays).map(load, "
            "num_parallel_calls=tf.data.AUTOTUNE)  # load: tf.io.read_file, tf.io.decode_jpeg, ...",
            gain=gain_of(waiting.share),
            sure="likely",
        )


def _uncached(loop: Loop, waiting: _Waiting, machine: Machine) -> Iterator[ScriptFinding]:
    kinds = {stage.kind for stage in loop.stages}
    if loop.passes < 2 or kinds & {"cache", "snapshot"}:
        return
    for number, stage in enumerate(loop.stages):
        share = map_share(loop, stage)
        if stage.kind != "map" or share is None or share < MIN_SHARE:
            continue
        if not stage.in_user_code and stage not in loop.user_stages():
            continue
        size = _size(loop, number)
        if any(each.random for each in loop.stages[number:]) or size is None:
            continue
        if size <= MAX_MEMORY * machine.memory_bytes:
            yield ScriptFinding(
                kind="uncached",
                place=stage.place,
                observation=f"this map did the same work in each of {loop.passes} passes, {share:.0%} of the "
                f"input's CPU time; its results take {size / 1e6:.3g} MB; {waiting.text}",
                why="It uses no random values: from the second pass on, its results could be read from "
                "memory.",
                change=_where_to_cache(loop, number),
                gain=gain_of(waiting.share * share * (1.0 - 1.0 / loop.passes)),
                sure="likely",
            )
            return


def _where_to_cache(loop: Loop, number: int) -> str:
    if not loop.stages[number].in_user_code:
        return (
            "dataset = dataset.cache().shuffle(1_000).prefetch(tf.data.AUTOTUNE)  # after this call; "
            "it shuffles whole batches, not rows"
        )
    below = {each.kind for each in loop.stages[number:]}
    if below & {"shuffle", "batch", "padded_batch"}:
        return (
            ".map(...).cache().shuffle(...).batch(...)  # this map first: before shuffle and batch"
        )
    return ".map(...).cache()  # before shuffle, batch and anything random"


def _size(loop: Loop, number: int) -> int | None:
    """Total bytes of all elements of a stage in a pass; None if unknown."""
    stage = loop.stages[number]
    elements = _elements(loop, stage)
    each = stage.element_bytes
    if each is None and stage.row_bytes is not None:
        each = stage.row_bytes * max(1, loop.rows)
    return None if each is None or elements <= 0 else each * elements


def _shuffle_memory(loop: Loop, machine: Machine) -> Iterator[ScriptFinding]:
    held = nodes_of(loop.nodes, loop.stages, "shuffle")
    for stage in loop.stages:
        count = stage.arguments.get("buffer_size")
        if stage.kind != "shuffle" or not stage.in_user_code or not isinstance(count, int):
            continue
        each = stage.element_bytes
        node = held.get(stage.place)
        if each is None and node is not None and node.buffered:
            each = node.buffered_bytes // node.buffered
        if each is None or count <= 0:
            continue
        elements = min(count, _elements(loop, stage) or count)
        size = each * elements
        if size > MAX_MEMORY * machine.memory_bytes:
            fitting = max(1, int(MAX_MEMORY * machine.memory_bytes / 4 / max(1, each)))
            line = argument_line(stage.place, "shuffle", "buffer_size", position=0, value=count)
            yield ScriptFinding(
                kind="shuffle_memory",
                place=line or stage.place,
                observation=f"a buffer of {elements:,} elements of {each:,} bytes is {size / 2**30:.1f} GiB "
                f"of this machine's {machine.memory_bytes / 2**30:.1f} GiB",
                why="The buffer is filled before the first batch, and its memory stays in use.",
                change=f".shuffle({fitting:_})  # or shuffle file names, and read the files after that",
                gain=None,
                sure="measured",
            )


def _elements(loop: Loop, stage: Stage) -> int:
    """Number of elements per pass: the dataset's own figure, or an estimate from its batches; 0 if unknown."""
    if stage.cardinality > 0:
        return stage.cardinality
    batches = loop.batches_a_pass
    above = {each.kind for each in loop.stages[: loop.stages.index(stage)]}
    # If no stage above this one makes batches, its elements are batches.
    return batches * (max(1, loop.rows) if above & BATCHES else 1)


def _float64(loop: Loop) -> Iterator[ScriptFinding]:
    # The stages are in reverse order, so `wide[-1]` is the user's first stage with float64: the one to change.
    wide = [stage for stage in loop.stages if stage.in_user_code and "float64" in stage.dtypes]
    if not wide or (loop.stages and "float64" not in loop.stages[0].dtypes):
        return
    dtypes, line = wide[-1].dtypes, None
    if wide[-1].kind in ("from_tensor_slices", "from_tensors"):
        line = array_line(wide[-1].place, wide[-1].kind, dtypes.index("float64"))
    share = dtypes.count("float64") / len(dtypes)
    parts = "" if share == 1 else f" in {dtypes.count('float64')} of their {len(dtypes)} parts"
    yield ScriptFinding(
        kind="float64_data",
        place=line or wide[-1].place,
        observation=f"the dataset's elements contain float64{parts}",
        why="float64 takes twice the memory and bandwidth of float32, and each step converts it (or, in a "
        "loop of your own, may compute in float64).",
        change="Use float32: array.astype('float32'), or tf.cast(x, tf.float32) in the map.",
        gain=(1.0, 1.0 + 0.3 * share),
        sure="likely",
    )
