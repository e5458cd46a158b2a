"""For each stage of an input: the user's line that defines it, and its cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stoker.scriptprofile.observations import Node, Place, Stage


@dataclass(frozen=True, kw_only=True, slots=True)
class StageCost:
    """One stage of the input, as TensorFlow ran it."""

    name: str
    """TensorFlow's name of the stage; TensorFlow fuses some stages, and adds others."""

    place: Place | None
    """The user's line that defines the stage; None if the user's code does not define it."""

    cpu_s_per_sample: float
    """CPU time per sample, seconds."""

    share: float
    """Its share of the input's CPU time."""

    stage: Stage | None = None
    """The call that created it; None if TensorFlow added it."""


def stage_costs(
    nodes: Sequence[Node], stages: Sequence[Stage], *, rows: int
) -> tuple[StageCost, ...]:
    """Return the CPU time per sample of each stage of the input, last stage first.

    Args:
        nodes: The stages that TensorFlow ran, last stage first.
        stages: The stages in the script, last stage first.
        rows: Samples per step; 0 if unknown.
    """
    if sum(node.cpu_s for node in nodes) <= 0:
        return ()
    placed = stages_of(nodes, stages)
    below = _read_by_a_shuffle(placed, stages)
    costs: list[tuple[str, Stage | None, float]] = []
    samples = float(rows or 1)
    for node, stage in zip(nodes, placed, strict=True):
        if node.name != "Root" and node.elements:
            name, cost_s = node.name, node.per_output * node.cpu_s / node.elements / samples
            if below and node is nodes[-1]:
                name = f"{name}, and all that it reads ({below})"
            if stage is not None and stage.kind == GENERATOR:
                name = "Generator"
                if costs and costs[-1][1] is stage:
                    cost_s += costs.pop()[2]
            costs.append((name, stage, cost_s))
        if "Batch" in node.name and node.ratio > 0:
            # In the stages below a batch, an element is one sample.
            samples = max(1.0, samples / node.ratio)
    together_s = sum(cost_s for *_, cost_s in costs) or 1.0
    return tuple(
        StageCost(
            name=name,
            place=stage.place if stage is not None and stage.in_user_code else None,
            cpu_s_per_sample=cost_s,
            share=cost_s / together_s,
            stage=stage,
        )
        for name, stage, cost_s in costs
    )


def _read_by_a_shuffle(placed: Sequence[Stage | None], stages: Sequence[Stage]) -> str:
    """Return the kinds of the user's stages below a shuffle that had read its whole input before the inspection.

    TensorFlow drops these stages after that, and counts their time as time of the shuffle.
    """
    last = placed[-1]
    if last is None or last.kind != "shuffle":
        return ""
    under = stages[stages.index(last) + 1 :]
    return ", ".join(dict.fromkeys(stage.kind for stage in under if stage.in_user_code))


def stages_of(nodes: Sequence[Node], stages: Sequence[Stage]) -> list[Stage | None]:
    """Return, for each node, the stage that it runs; None if TensorFlow added the node.

    As many nodes as possible are paired with stages, in the order of both. Otherwise, a prefetch that TensorFlow added
    above the user's prefetch would be taken for the user's.
    """
    fits = [[stage.kind in _kinds(node) for stage in stages] for node in nodes]
    # most[i][j]: maximum number of pairs that nodes[i:] and stages[j:] can form.
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
            # At the end of a pass, TensorFlow drops the Generator and counts its time as time of the FlatMap.
            found[-1] = next(
                (each for each in stages[next_ : next_ + 1] if each.kind == GENERATOR), None
            )
    return found


GENERATOR = "from_generator"
_AROUND_A_GENERATOR = ("FlatMap", "FromTensor")
"""Stages that TensorFlow builds around a Generator."""


_KINDS = (
    # MapAndBatch combines two stages; the map is the expensive one, so its line is reported.
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
