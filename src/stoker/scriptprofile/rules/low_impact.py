"""Findings with little effect here, each with the reason for that.

For example, a script without prefetch should not get "nothing was found" just because TensorFlow added a prefetch, or
because the step does not wait: with another model, or on a faster device, the same lines would cost time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from stoker.measure.findings import useless_bias
from stoker.scriptprofile.loops import DatasetLoop, FitLoop, Loop
from stoker.scriptprofile.observations import Node, Stage, to_place
from stoker.scriptprofile.rules.finding import ScriptFinding
from stoker.scriptprofile.rules.input_rules import (
    MIN_SHARE,
    MIN_WAIT,
    given_by_generator,
    is_cached,
    is_sequential,
    map_share,
    nodes_of,
    runs_ahead,
)
from stoker.scriptprofile.rules.python_rules import (
    MUCH_PYTHON,
    SMALL_BATCH,
    batch_line,
    larger_batch,
)


def minor_findings(loop: Loop, found: Iterable[ScriptFinding]) -> Iterator[ScriptFinding]:
    """Return issues that have little effect here, but could cost time elsewhere.

    Args:
        loop: A training loop.
        found: All findings so far; what they report is not returned again.
    """
    known = {(each.kind, each.place) for each in found}
    minor = [
        *_prefetch(loop),
        *_made_by_python(loop),
        *_maps(loop),
        *_batch(loop),
        *_biases(loop),
    ]
    dear = {place for kind, place in known if kind in ("python_map", "generator_rows")}
    for each in minor:
        # If Python makes each element, more threads do not help, and a finding already reports Python.
        if (each.kind, each.place) not in known and each.place not in dear:
            yield each


def _prefetch(loop: Loop) -> Iterator[ScriptFinding]:
    mine = [stage for stage in loop.stages if stage.in_user_code]
    # A distribution strategy prefetches by itself.
    spread = loop.model.get("distributed")
    if not mine or spread or any(stage.kind == "prefetch" for stage in loop.stages):
        return
    ahead = next((node for node in loop.nodes[:3] if runs_ahead(node)), None)
    done = None if ahead is None else f"prepares batches ahead ({ahead.name})"
    why, gain = _worth(loop, done=done)
    yield ScriptFinding(
        kind="missing_prefetch",
        place=mine[0].place,
        observation=f"your code does not prepare the next batch while a step computes; {why}",
        why="Without prefetch, the input is idle while the step computes, and the step is idle while "
        "the input works.",
        change="dataset = dataset.prefetch(tf.data.AUTOTUNE)",
        gain=gain,
        sure="measured" if loop.wait is not None else "possible",
    )


def _made_by_python(loop: Loop) -> Iterator[ScriptFinding]:
    """Report a generator, or a map that calls Python, even if the step does not wait for it here."""
    for number, stage in enumerate(loop.stages):
        if not stage.in_user_code or is_cached(loop, stage):
            continue
        if stage.kind == "from_generator":
            kind, given = given_by_generator(loop, number)
            what = f"a Python generator gives one {given}"
        elif stage.kind == "map" and stage.python_calls:
            kind, what = "python_map", "tf.py_function makes one sample"
        else:
            continue
        why, gain = _worth(loop, done=None)
        yield ScriptFinding(
            kind=kind,
            place=stage.place,
            observation=f"{what} at a time; {why}",
            why="Only one thread runs Python at a time: a faster step would have to wait for it, whatever "
            "the number of cores.",
            change="Read and decode with TensorFlow's operations in a parallel map.",
            gain=gain,
            sure="measured" if loop.wait is not None else "possible",
        )


def _maps(loop: Loop) -> Iterator[ScriptFinding]:
    wait = loop.wait
    ran = nodes_of(loop.nodes, loop.stages, "map")
    for stage in loop.stages:
        is_set = stage.arguments.get("num_parallel_calls") is not None
        if stage.kind != "map" or not stage.in_user_code or stage.python_calls or is_set:
            continue
        if is_cached(loop, stage):
            continue
        why, gain = _worth(loop, done=_made_parallel(stage, ran.get(stage.place)))
        share = map_share(loop, stage)
        cheap = share is not None and share < MIN_SHARE
        if wait is not None and wait >= MIN_WAIT and share is not None and cheap:
            gain = 1.0, 1.0 / (1.0 - min(wait * share, 0.95))
            why = f"little gain here: it takes {share:.1%} of the input's CPU time, so at most {gain[1]:.3g}x"
        yield ScriptFinding(
            kind="sequential_map",
            place=stage.place,
            observation=f"this map is written to process one element at a time; {why}",
            why="One core prepares the data while the other cores are idle.",
            change=".map(..., num_parallel_calls=tf.data.AUTOTUNE)",
            gain=gain,
            sure="measured" if wait is not None else "possible",
        )


def _made_parallel(stage: Stage, node: Node | None) -> str | None:
    if node is None or is_sequential(stage, node):
        return None
    return f"made it parallel ({node.name})"


def _batch(loop: Loop) -> Iterator[ScriptFinding]:
    if not 0 < loop.rows <= SMALL_BATCH or not isinstance(loop, FitLoop | DatasetLoop):
        return
    python = None if loop.split is None else loop.split.python
    if python is None:
        why = "the share of Python in a step was not measured"
    elif python < MUCH_PYTHON:
        why = f"Python takes {python:.1%} of a step, outside the call that computes it"
    else:
        # With this much Python, another rule would already have reported a batch that is too small.
        return
    yield ScriptFinding(
        kind="small_batch",
        place=batch_line(loop),
        observation=f"batches of {loop.rows}; {why}; the cost of the call itself, and the gain of the compiled "
        "step from a larger batch, were not measured",
        why="The device is idle between very short steps.",
        change=larger_batch(loop),
        gain=None,
        sure="possible",
    )


def _biases(loop: Loop) -> Iterator[ScriptFinding]:
    found = loop.model.get("useless_biases") or {}
    if not found.get("count"):
        return
    finding = useless_bias(
        [each["name"] for each in found["layers"]],
        count=found["count"],
        parameters=found["parameters"],
        of_parameters=found["of_parameters"],
    )
    first = found["layers"][0]
    yield ScriptFinding(
        kind="useless_bias",
        place=to_place(first["place"]) or loop.place,
        observation=finding.message,
        why="BatchNormalization subtracts the mean of each channel, and thereby removes the bias.",
        change=finding.fix,
        gain=None,
        sure="possible",
    )


def _worth(loop: Loop, *, done: str | None) -> tuple[str, tuple[float, float] | None]:
    """Return why a change of the input has little effect, and the range of the possible gain.

    Args:
        loop: A training loop.
        done: What TensorFlow itself does about it already, a clause; None if nothing.
    """
    wait, whole = loop.wait, None if loop.split is None else loop.split.input_share()
    if done is not None:
        return f"little gain here: TensorFlow itself {done}", (1.0, 1.0)
    if wait is None and whole is not None:
        gain = 1.0, 1.0 / (1.0 - min(whole, 0.95))
        all_of_it = f"the whole input costs {whole:.0%} of a step"
        return f"W was not measured, but {all_of_it}, so at most {gain[1]:.3g}x", gain
    if wait is None:
        return "its cost is unknown: W was not measured", None
    gain = 1.0, 1.0 / (1.0 - min(wait, 0.95))
    return f"little gain here: W is {wait:.1%}, so at most {gain[1]:.3g}x", gain
