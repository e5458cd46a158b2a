"""How often a loop of a traced graph runs, where that does not depend on what is fed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from stoker.measure.flops_graph import Body


@dataclass(frozen=True, kw_only=True, slots=True)
class Turns:
    """How often a loop's body runs."""

    number: int | None
    """None: that is only known when it runs."""

    at_most: bool
    """Whether something else may end it sooner."""


def loop_turns(outer: Body, loop: Any, *, library: dict[str, Body]) -> Turns:
    """How often the body of a `While` runs.

    The loop's condition is one `Less(counter, bound)`, or several that must all hold, as Keras's
    recurrent layers, `tf.map_fn`, `tf.scan` and a Python `for` over `tf.range` write it; a `break`
    makes AutoGraph write `Less(...) and not broken`.

    Args:
        outer: Where the loop stands.
        loop: Its node.
        library: The graph's functions.
    """
    condition = library[loop.attr["cond"].func.name]
    leaves = list(_conjunction(condition, condition.results[0], library=library))
    counted = [_turns_of(outer, loop, leaf, library=library) for leaf in leaves]
    known = [number for number in counted if number is not None]
    return Turns(number=min(known) if known else None, at_most=len(known) < len(counted))


def _conjunction(
    condition: Body, reference: str, *, library: dict[str, Body]
) -> Iterator[Any | None]:
    """The comparisons that must all hold; None for one that is none."""
    node, _ = condition.source(reference)
    if node is None:
        yield None
    elif node.op in ("Identity", "LogicalAnd"):
        for before in condition.inputs(node):
            yield from _conjunction(condition, before, library=library)
    elif node.op in ("If", "StatelessIf") and _is_false(
        library[node.attr["else_branch"].func.name]
    ):
        yield from _conjunction(condition, condition.inputs(node)[0], library=library)
        yield None
    else:
        yield node


def _is_false(branch: Body) -> bool:
    """Whether a branch gives False whatever enters: then the other one is Python's `and`."""
    node, _ = branch.source(branch.results[0])
    while node is not None and node.op == "Identity":
        node, _ = branch.source(branch.inputs(node)[0])
    return (
        node is not None and node.op == "Const" and not tf.make_ndarray(node.attr["value"].tensor)
    )


def _turns_of(
    outer: Body, loop: Any, comparison: Any | None, *, library: dict[str, Body]
) -> int | None:
    if comparison is None or comparison.op not in ("Less", "LessEqual"):
        return None
    condition, body = (library[loop.attr[role].func.name] for role in ("cond", "body"))
    left, right = condition.inputs(comparison)
    counter = condition.argument(left)
    bound = _entering(outer, loop, condition, body, right)
    if counter is None or bound is None:
        return None
    first = outer.number(outer.inputs(loop)[counter])
    step = _step(outer, loop, body, counter)
    if first is None or not step:
        return None
    last = bound + (comparison.op == "LessEqual")
    return max(0, math.ceil((last - first) / step))


def _entering(outer: Body, loop: Any, condition: Body, body: Body, reference: str) -> int | None:
    """The value of a bound: a constant of the condition, or what enters and is never changed."""
    place = condition.argument(reference)
    if place is None:
        return condition.number(reference)
    if body.argument(body.results[place]) != place:
        return None
    return outer.number(outer.inputs(loop)[place])


def _step(outer: Body, loop: Any, body: Body, counter: int) -> int | None:
    """What a turn adds to the counter, above 0, or None."""
    node, _ = body.source(body.results[counter])
    while node is not None and node.op == "Identity":
        node, _ = body.source(body.inputs(node)[0])
    if node is None or node.op not in ("Add", "AddV2"):
        return None
    parts = body.inputs(node)
    others = [part for part in parts if body.argument(part) != counter]
    if len(others) != 1:
        return None
    step = _entering(outer, loop, body, body, others[0])
    return step if step is not None and step > 0 else None
