"""Where a step's time went, and what each stage of its input cost."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stoker.scriptprofile.observations import BUSY, Loop, Node, Place, Stage

LEAST_STEPS = 5
"""Fewer measured steps say nothing."""

MOST_BUSY = 1.5
"""A higher U is none: on one batch a step can only be quicker."""

UNPARTED = "input, Python, Keras"
"""The part of a step of `fit` that is not the compiled step, where nobody sees how long it waits."""

OVER = 1.005
"""U from which on it is more than 100 % when it is written."""

BESIDE = "Python, Keras, and the input's work beside the step"
"""The part of a step of `fit` that is neither waited for nor the compiled step, where the input takes
much of the cores."""

LEAST_COST = 0.5
"""Ratio of a batch's CPU time to a step's time outside computation: from here on, the input is the
cause."""

MUCH_BESIDE = 0.2
"""Of the time of all cores that the script may use."""

ITS_INPUT = "its input"
"""The part of a step whose wait nobody sees, which one batch that is there does without."""

TRANSFER = "transfer to the GPU"
"""The part of the compiled step that copying a batch takes where nothing else runs: the most that it
can hold the step up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSplit:
    """One step of a loop, on the mean."""

    step_s: float
    """T_real, seconds a step."""

    parts: Mapping[str, float]
    """Part -> seconds a step; together they are the step."""

    input_wait: float | None
    """W, the share of the step that waits for input, in [0, 1]."""

    python: float | None
    """Share of the step that Python takes between the calls of the compiled step, in [0, 1]; of
    `model.fit` the least of all rounds."""

    busy: float | None
    """U = T_ceil / T_real; about 1 at most."""

    no_busy: str
    """Why U was not measured."""

    no_wait: str = ""
    """Why W was not measured."""

    def shown_busy(self) -> str:
        """`U 97%`, empty where it was not measured.

        The device cannot be busier than always, whatever the windows took.
        """
        if self.busy is None:
            return ""
        measured = f"{self.busy:.0%}"
        return f"U {measured}" if self.busy < OVER else f"U 100% ({measured} as measured)"


@dataclass(frozen=True, kw_only=True, slots=True)
class StageCost:
    """One stage of the input, as TensorFlow ran it."""

    name: str
    """TensorFlow's name; it fuses stages, and adds some."""

    place: Place | None
    """The line of the user's that asked for it."""

    cpu_s_per_sample: float
    """CPU time a sample, seconds."""

    share: float
    """Of the whole input's CPU time."""

    stage: Stage | None = None
    """The call that asked for it."""


def input_share(split: StepSplit | None) -> float | None:
    """What the input costs of a step at most, in [0, 1], where W is not known; None: not known too."""
    found = () if split is None else [split.parts.get(each) for each in (ITS_INPUT, UNPARTED)]
    part_s = next((each for each in found if each is not None), None)
    return None if split is None or part_s is None else part_s / split.step_s


@dataclass(frozen=True, kw_only=True, slots=True)
class InputWait:
    """The share of a step that waits for input, and how it is known."""

    share: float
    """In [0, 1]."""

    text: str
    """A clause: `the step waits 40% of its time`."""

    measured: bool
    """Whether it is W; else it follows from U and from the cost of the input's stages."""


def input_wait(loop: Loop, split: StepSplit | None) -> InputWait | None:
    """The share of a step that waits for input: W, or without W an estimate from U and the stages.

    None if neither is known, or if the stages cost too little to be the cause.
    """
    if split is None:
        return None
    if split.input_wait is not None:
        text = f"the step waits {split.input_wait:.0%} of its time"
        return InputWait(share=split.input_wait, text=text, measured=True)
    share, cost_s = input_share(split), _input_cpu_s(loop)
    if loop.kind != "fit" or share is None or cost_s < LEAST_COST * share * split.step_s:
        return None
    text = (
        f"{share:.0%} of the step is not computation, and a batch costs {1e3 * cost_s:.3g} ms of "
        f"CPU where a step takes {1e3 * split.step_s:.3g} ms (W was not measured)"
    )
    return InputWait(share=share, text=text, measured=False)


def split_step(loop: Loop) -> StepSplit | None:
    """Split a loop's step; None where too few steps were measured.

    The step of a loop inside of a tf.function is a whole call, unless it is known of how many.
    """
    # A call of such a loop is a whole pass.
    least = 1 if loop.kind == "inside" else LEAST_STEPS
    if loop.measured_steps < least or loop.period_s <= 0:
        return None
    if loop.kind == "inside" and loop.rounds:
        return _split_inside(loop)
    return _split_fit(loop) if loop.kind == "fit" else _split_loop(loop)


def _split_loop(loop: Loop) -> StepSplit:
    steps = loop.measured_steps
    wait_s, call_s, sync_s = loop.wait_s / steps, loop.call_s / steps, loop.sync_s / steps
    step_s = loop.period_s / steps
    python_s = max(0.0, step_s - wait_s - call_s - sync_s)
    rest = "Python, eager operations" if loop.eager_gradients else "Python"
    parts = {"waiting for input": wait_s, "tf.function": call_s, "reading values": sync_s}
    parts = dict(_with_transfer(loop, parts, of="tf.function"))
    # Without an iterator of tf.data nobody sees where the data comes from.
    seen = loop.kind == "dataset"
    return StepSplit(
        step_s=step_s,
        parts={name: value for name, value in parts.items() if value > 0} | {rest: python_s},
        input_wait=_left_by_the_step(loop, wait_s / step_s) if seen else None,
        python=_python_share(loop, python_s / step_s) if loop.kind != "inside" else None,
        busy=_busy(loop),
        no_busy=_no_busy(loop, loop.no_ceiling or _NO_BUSY.get(loop.kind, "")),
        no_wait=_NO_WAIT.get(loop.kind, ""),
    )


def _python_share(loop: Loop, share: float) -> float:
    """The share of a step that Python takes, without what other programs took of the step.

    Python takes at least its CPU time; the rest, such as sleep, may be a wait for a core.
    """
    load = loop.load
    if not load:
        return share
    quiet_s = load["wall_s"] - load["away_s"]
    python_s = max(load["python_run_s"], load["python_s"] - load["wait_s"])
    return min(1.0, max(0.0, min(python_s, load["python_s"])) / quiet_s) if quiet_s > 0 else share


def _with_transfer(loop: Loop, parts: Mapping[str, float], *, of: str) -> Mapping[str, float]:
    """The parts of a step, with the transfer taken out of the one that holds it."""
    if not loop.rounds:
        return parts
    took_s = statistics.median(each.get("transfer_s", 0.0) / each["calls"] for each in loop.rounds)
    transfer_s = min(took_s, parts[of])
    if transfer_s <= 0:
        return parts
    split: dict[str, float] = {}
    for name, part_s in parts.items():
        if name == of:
            split[TRANSFER] = transfer_s
        split[name] = part_s - (transfer_s if name == of else 0.0)
    return split


_NO_WAIT = {
    "fit": "tf.data kept no times between the elements of this input",
    "calls": "no iterator of tf.data was asked for batches by Python",
    "inside": "one call holds many steps, and from outside their waits cannot be told apart",
}
"""Kind of a loop -> why nobody sees how long a step waits."""


_NO_BUSY = {
    "dataset": "the training was too short, or Python runs its operations one by one",
    "calls": "a loop over arrays has no batch that could be given again",
    "inside": "the loop lies inside of a tf.function, and was called too seldom: its first two calls "
    "are set apart",
}
"""Kind of a loop -> why its step was not run on one batch."""


def _busy(loop: Loop) -> float | None:
    ratio = _ratio(loop)
    return None if ratio is None or ratio > MOST_BUSY else ratio


def _ratio(loop: Loop) -> float | None:
    return statistics.median(_ratios(loop)) if loop.rounds else None


def _ratios(loop: Loop) -> list[float]:
    """T_ceil / T_real of each round."""
    return [_ceiling_s(each) / each["real_s"] for each in loop.rounds]


def _ceiling_s(of: Mapping[str, float]) -> float:
    """T_ceil of a round, seconds, as if other programs had taken as much of it as of T_real."""
    quiet_s = of["ceiling_s"] * (1.0 - of.get("ceiling_away", 0.0))
    return quiet_s / max(0.01, 1.0 - of.get("real_away", 0.0))


def _no_busy(loop: Loop, otherwise: str) -> str:
    """Why U is not known; empty where it is."""
    ratio = _ratio(loop)
    if ratio is None:
        return otherwise
    if ratio <= MOST_BUSY:
        return ""
    return (
        f"a step on one batch took {ratio:.2g} times as long as a real one: something else was at "
        "work on this machine"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochStarts:
    """What `fit` waits for before the first step of an epoch, the first one's apart."""

    each_s: float
    """Seconds an epoch, a step's own time taken off: the median, of two the shorter."""

    share: float
    """Of the time of all measured steps and these waits, in [0, 1]."""


def epoch_starts(loop: Loop, split: StepSplit | None) -> EpochStarts | None:
    """The waits at the begin of epochs; None where there was one epoch, or nothing was measured."""
    if split is None or not loop.starts:
        return None
    each_s = max(0.0, statistics.median_low(loop.starts) - split.step_s)
    waited_s = each_s * len(loop.starts)
    return EpochStarts(each_s=each_s, share=waited_s / (waited_s + loop.period_s))


def _split_inside(loop: Loop) -> StepSplit:
    """By calls with the script's own dataset, and with one of as many batches that are there."""
    step_s = statistics.median(each["real_s"] / each["calls"] for each in loop.rounds)
    ceiling_s = statistics.median(each["ceiling_s"] / each["calls"] for each in loop.rounds)
    compute_s = min(ceiling_s, step_s)
    parts = {"compiled step": compute_s, ITS_INPUT: step_s - compute_s}
    return StepSplit(
        step_s=step_s,
        parts=_with_transfer(loop, parts, of="compiled step"),
        input_wait=None,
        python=None,
        busy=_busy(loop),
        no_busy=_no_busy(loop, ""),
        no_wait=_NO_WAIT["inside"],
    )


def _split_fit(loop: Loop) -> StepSplit:
    wait = _gap_wait(loop)
    if not loop.rounds:
        step_s, call_s = loop.period_s / loop.measured_steps, loop.call_s / loop.measured_steps
        return StepSplit(
            step_s=step_s,
            parts={"step and its input": call_s, "Keras, callbacks": max(0.0, step_s - call_s)},
            input_wait=wait,
            python=None,
            busy=None,
            no_busy=loop.no_ceiling or "the training was too short",
            no_wait=_NO_WAIT["fit"] if wait is None else "",
        )
    real_s = statistics.median(each["real_s"] / each["calls"] for each in loop.rounds)
    ceiling_s = statistics.median(_ceiling_s(each) / each["calls"] for each in loop.rounds)
    wait_s = min(real_s, (wait or 0.0) * real_s)
    compute_s = min(ceiling_s, real_s - wait_s)
    rest_s = max(0.0, real_s - wait_s - compute_s)
    # Noise slows the one or the other window: what all rounds agree on is Python's.
    most = max(_ratios(loop))
    python = None if wait is None else max(0.0, 1.0 - most - wait)
    parts = {"waiting for input": wait_s, "compiled step": compute_s, "Python, Keras": rest_s}
    if wait is None:
        parts = {"compiled step": compute_s, UNPARTED: rest_s}
    elif _input_cpu_s(loop) > MUCH_BESIDE * loop.cores * real_s:
        # The resident batch has the cores for itself: what is left is the input's as much as Python's.
        python = None
        parts = {"waiting for input": wait_s, "compiled step": compute_s, BESIDE: rest_s}
    return StepSplit(
        step_s=real_s,
        parts=_with_transfer(loop, parts, of="compiled step"),
        input_wait=wait,
        python=python,
        busy=_busy(loop),
        no_busy=_no_busy(loop, ""),
        no_wait=_NO_WAIT["fit"] if wait is None else "",
    )


def _input_cpu_s(loop: Loop) -> float:
    """CPU time of the input for a call of the train function."""
    rows = loop.rows * int(loop.model.get("steps_per_execution", 1))
    return rows * sum(cost.cpu_s_per_sample for cost in stage_costs(loop))


def _gap_wait(loop: Loop) -> float | None:
    """W out of the gaps between two elements that tf.data measures, over all rounds."""
    of_s = sum(each.get("gap_of_s", 0.0) for each in loop.rounds)
    gap_s = sum(each.get("gap_s", 0.0) for each in loop.rounds)
    if of_s <= 0:
        gap_s, of_s = (
            (sum(column) for column in zip(*loop.gaps, strict=True)) if loop.gaps else (0, 0)
        )
    return _left_by_the_step(loop, 1.0 - gap_s / of_s) if of_s > 0 else None


def _left_by_the_step(loop: Loop, wait: float) -> float:
    """W in [0, 1]; on a busy machine at most what U leaves, since waits for a core look like it."""
    away = [each.get("real_away", 0.0) for each in loop.rounds]
    if away and statistics.median(away) >= BUSY:
        wait = min(wait, 1.0 - min(_ratios(loop)))
    return min(1.0, max(0.0, wait))


def stage_costs(loop: Loop) -> tuple[StageCost, ...]:
    """CPU time a sample of each stage of the input, last stage first."""
    whole_s = sum(node.cpu_s for node in loop.nodes)
    if not loop.nodes or whole_s <= 0:
        return ()
    placed = stages_of(loop)
    below = _read_by_a_shuffle(loop, placed)
    costs: list[tuple[str, Stage | None, float]] = []
    rows = float(loop.rows or 1)
    for node, stage in zip(loop.nodes, placed, strict=True):
        if node.name != "Root" and node.elements:
            name, cost_s = node.name, node.per_output * node.cpu_s / node.elements / max(rows, 1e-9)
            if below and node is loop.nodes[-1]:
                name = f"{name}, and all that it reads ({below})"
            if stage is not None and stage.kind == GENERATOR:
                name = "Generator"
                if costs and costs[-1][1] is stage:
                    cost_s += costs.pop()[2]
            costs.append((name, stage, cost_s))
        if "Batch" in node.name and node.ratio > 0:
            # Below it an element is one sample.
            rows = max(1.0, rows / node.ratio)
    together_s = sum(cost_s for *_, cost_s in costs) or 1.0
    return tuple(
        StageCost(
            name=name,
            place=stage.place if stage is not None and stage.by_user else None,
            cpu_s_per_sample=cost_s,
            share=cost_s / together_s,
            stage=stage,
        )
        for name, stage, cost_s in costs
    )


def _read_by_a_shuffle(loop: Loop, placed: Sequence[Stage | None]) -> str:
    """The kinds of the user's stages below a shuffle that had read all of them when it was looked at.

    TensorFlow has dropped these stages then, and counts what they took as the shuffle's.
    """
    last = placed[-1]
    if last is None or last.kind != "shuffle":
        return ""
    under = loop.stages[loop.stages.index(last) + 1 :]
    return ", ".join(dict.fromkeys(stage.kind for stage in under if stage.by_user))


def stages_of(loop: Loop) -> list[Stage | None]:
    """For each node the stage that asked for it, None where TensorFlow added it.

    As many as fit in their order: a prefetch that TensorFlow has added stands above the user's, and
    would else take all that is between them.
    """
    nodes, stages = loop.nodes, loop.stages
    fits = [[stage.kind in _kinds(node) for stage in stages] for node in nodes]
    # most[i][j]: pairs that the nodes from i on and the stages from j on can make.
    most = [[0] * (len(stages) + 1) for _ in range(len(nodes) + 1)]
    for i in reversed(range(len(nodes))):
        for j in reversed(range(len(stages))):
            pair = most[i + 1][j + 1] + 1 if fits[i][j] else 0
            most[i][j] = max(pair, most[i + 1][j], most[i][j + 1])
    found: list[Stage | None] = []
    next_ = 0
    for i in range(len(nodes)):
        pairs = (
            j
            for j in range(next_, len(stages))
            if fits[i][j] and most[i + 1][j + 1] + 1 == most[i][next_]
        )
        place = next(pairs, None)
        found.append(None if place is None else stages[place])
        if place is not None:
            next_ = place + 1
        elif nodes[i].name in _AROUND_A_GENERATOR:
            # At the end of a pass TensorFlow drops the Generator and counts its time as the FlatMap's.
            found[-1] = next(
                (each for each in stages[next_ : next_ + 1] if each.kind == GENERATOR), None
            )
    return found


GENERATOR = "from_generator"
_AROUND_A_GENERATOR = ("FlatMap", "FromTensor")
"""What TensorFlow builds around a Generator."""


_KINDS = (
    # MapAndBatch stands for two stages: the map's line is the one that is dear.
    ("MapAndBatch", ("map",)),
    ("ParallelMap", ("map",)),
    ("Map", ("map",)),
    ("ParallelBatch", ("batch",)),
    ("PaddedBatch", ("padded_batch",)),
    ("Batch", ("batch",)),
    ("Shuffle", ("shuffle",)),
    ("Prefetch", ("prefetch",)),
    ("MemoryCache", ("cache",)),
    ("Cache", ("cache",)),
    ("ParallelInterleave", ("interleave",)),
    ("Interleave", ("interleave",)),
    ("Generator", (GENERATOR,)),
    ("TensorSlice", ("from_tensor_slices",)),
    ("TFRecord", ("TFRecordDataset",)),
    ("TextLine", ("TextLineDataset",)),
    ("FlatMap", ("flat_map",)),
    ("Filter", ("filter",)),
    ("Range", ("range",)),
)


def _kinds(node: Node) -> tuple[str, ...]:
    return next((kinds for start, kinds in _KINDS if node.name.startswith(start)), ())
