"""Findings about avoidable costs of the step itself, and about silent errors of the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from stoker.scriptprofile.facts import WatchedProcess
from stoker.scriptprofile.loops import FitLoop, Loop, OwnLoop
from stoker.scriptprofile.observations import Function, to_place
from stoker.scriptprofile.rules.finding import ScriptFinding, gain_of
from stoker.scriptprofile.rules.gpu_rules import gpu_findings
from stoker.scriptprofile.rules.origin import argument_line, dtype_line, step_line
from stoker.scriptprofile.rules.python_rules import python_findings
from stoker.scriptprofile.rules.wait_rules import batch_call_findings

MAX_TRACES = 4
"""Maximum number of traces of a function without a finding: for example two for a first call that creates variables,
and one for the short last batch of an epoch."""

PASSING_CALLS = 5
"""A tf.function with at most this many calls per object counts as created again and again, e.g. in a loop."""

MAX_NAMED = 3
"""Maximum number of changed arguments that a finding names."""

SYNC_SHARE = 0.8
"""If at least this share of a loop's steps read a value, every step counts as reading it."""

MIN_SYNCS = 20
"""Minimum number of steps of a loop for a finding about read values."""


def step_findings(loop: Loop, process: WatchedProcess) -> Iterator[ScriptFinding]:
    """Return the findings about a loop's step."""
    eager = list(_eager(loop, process))
    yield from eager
    if not eager:
        yield from _host_sync(loop, gpus=process.gpus)
        yield from batch_call_findings(loop, process)
        yield from python_findings(loop)
    if isinstance(loop, FitLoop):
        yield from _half_output(loop)
        yield from _float64_model(loop)
        yield from _outside_scope(loop, process)
        yield from _keras_distribution(loop)
    yield from gpu_findings(loop, process)


def _eager(loop: Loop, process: WatchedProcess) -> Iterator[ScriptFinding]:
    share = 0.5 if loop.split is None or loop.split.python is None else loop.split.python
    common = {
        "why": "Python starts each operation separately, so TensorFlow can neither fuse nor reorder "
        "them.",
        "gain": gain_of(max(0.5, share), min_saved=0.5),
        "sure": "likely",
    }
    if process.functions_run_eagerly:
        yield ScriptFinding(
            kind="eager_loop",
            place=loop.place,
            observation="tf.config.run_functions_eagerly(True) is set: no tf.function is compiled",
            change="tf.config.run_functions_eagerly(False)",
            **common,  # type: ignore[arg-type]  # mypy cannot check **
        )
    elif loop.model.get("run_eagerly"):
        yield ScriptFinding(
            kind="eager_loop",
            place=argument_line(loop.compiled_at, "compile", "run_eagerly", value=True)
            or loop.compiled_at,
            observation="the model was compiled with run_eagerly=True",
            change="model.compile(..., run_eagerly=False)",
            **common,  # type: ignore[arg-type]  # mypy cannot check **
        )
    elif isinstance(loop, OwnLoop) and loop.eager_gradients:
        place, count = max(loop.eager_gradients, key=lambda each: each[1])
        if count >= max(3, loop.steps // 2):
            yield ScriptFinding(
                kind="eager_loop",
                place=step_line(loop.step_calls) or place,
                observation=f"{count} of {loop.steps} steps computed their gradients outside a "
                "tf.function",
                change="@tf.function\ndef train_step(x, y): ...  # forward pass, tape.gradient and "
                "apply_gradients inside",
                **common,  # type: ignore[arg-type]  # mypy cannot check **
            )


def _host_sync(loop: Loop, *, gpus: int) -> Iterator[ScriptFinding]:
    if not isinstance(loop, OwnLoop) or loop.steps < MIN_SYNCS or not loop.syncs:
        return
    place, count = max(loop.syncs, key=lambda each: each[1])
    if count < SYNC_SHARE * loop.steps:
        return
    split = loop.split
    took = split.parts.get("reading values", 0.0) / split.step_s if split else 0.0
    yield ScriptFinding(
        kind="host_sync",
        place=place,
        observation=f"{count} values were read from tensors in {loop.steps} steps; reading took {took:.1%} of "
        "the time" + ("" if gpus else " (on a GPU it would cost more)"),
        why="Python waits until the device has ended the step, so it cannot prepare the next step during "
        "this time.",
        change="Keep the tensor (total += loss), and read its value once every 100 steps: "
        "if step % 100 == 0: print(float(loss))",
        gain=gain_of(took, min_saved=0.0) if not gpus else gain_of(min(0.5, took), min_saved=0.1),
        sure="measured" if gpus else "possible",
    )


def _half_output(loop: Loop) -> Iterator[ScriptFinding]:
    if not str(loop.model.get("policy", "")).startswith("mixed"):
        return
    for output in loop.model.get("half_outputs", ()):
        yield ScriptFinding(
            kind="half_output",
            place=to_place(output["place"]) or loop.place,
            observation=f"the output layer {output['name']} computes in {output['dtype']}",
            why="Softmax, sigmoid and the loss lose small probabilities in half precision: training "
            "becomes unstable, or makes no progress.",
            change='keras.layers.Dense(..., dtype="float32")  # only the output layer',
            gain=None,
            sure="measured",
        )


def _float64_model(loop: Loop) -> Iterator[ScriptFinding]:
    if variables := loop.model.get("float64"):
        yield ScriptFinding(
            kind="float64_model",
            place=dtype_line(loop.made_at, "float64") or loop.made_at,
            observation=f"variables are float64: {', '.join(variables[:3])}",
            why="float64 takes twice the memory of float32, and on a GPU up to 64 times as long.",
            change='keras.config.set_floatx("float32"), or dtype="float32" for these layers.',
            gain=(1.3, 2.0) if not loop.nodes else (1.0, 2.0),
            sure="likely",
        )


def _outside_scope(loop: Loop, process: WatchedProcess) -> Iterator[ScriptFinding]:
    if loop.model.get("replicas", 1) > 1:
        return
    for kind, place, replicas in process.strategies:
        if replicas > 1:
            yield ScriptFinding(
                kind="outside_scope",
                place=loop.made_at,
                observation=f"{kind} with {replicas} replicas was created in {place}, but this model was "
                "created outside its scope: only one device trains, without a warning",
                why="A Keras model uses the strategy in whose scope it is created; without one, the other "
                "devices are idle.",
                change="with strategy.scope():\n    model = ...\n    model.compile(...)",
                gain=(1.0, float(replicas)),
                sure="measured",
            )
            return


def _keras_distribution(loop: Loop) -> Iterator[ScriptFinding]:
    if not loop.model.get("keras_distribution"):
        return
    yield ScriptFinding(
        kind="keras_distribution",
        place=loop.made_at,
        observation=f"keras.distribution is set to a {loop.model['keras_distribution']}, but this model trains "
        f"on {loop.model.get('replicas', 1)} replica: with TensorFlow the setting has no effect, and Keras "
        "does not warn",
        why="Keras passes a distribution only to JAX; TensorFlow ignores it.",
        change="strategy = tf.distribute.MirroredStrategy()\n"
        "with strategy.scope():\n    model = ...\n    model.compile(...)",
        gain=None,
        sure="measured",
    )


def function_findings(process: WatchedProcess) -> Iterator[ScriptFinding]:
    """Return the findings about functions that were traced repeatedly."""
    for function in process.functions:
        # Several models may each create this function once. Each copy is then called many times, and is fine.
        is_passing = function.calls <= PASSING_CALLS * function.made
        if function.made > MAX_TRACES and function.traces > MAX_TRACES and is_passing:
            yield _made_again(function, process)
        elif function.traces > MAX_TRACES * function.made:
            yield _retraced(function, process)


def _made_again(function: Function, process: WatchedProcess) -> ScriptFinding:
    return ScriptFinding(
        kind="retracing",
        place=function.place,
        observation=f"{function.made} tf.functions were created from {function.name}, and each was traced "
        f"again, for {function.trace_s:.2g} s in total",
        why="Traces belong to a tf.function object: an object that a loop creates has no traces yet.",
        change="Define the tf.function once, outside the loop.",
        gain=_gain_of_traces(function, process),
        sure="measured",
    )


def _retraced(function: Function, process: WatchedProcess) -> ScriptFinding:
    causes, changes = [], []
    for name, values in _changing(function.causes):
        what = ", ".join(value.removeprefix("python ") for value in values[:3])
        if any(value.startswith("python") for value in values):
            causes.append(f"its argument {name} was the Python value {what}, ...")
            changes.append(
                f"{function.name}(..., {name}=tf.constant({name}))  # a tensor needs only one trace"
            )
        else:
            causes.append(f"its argument {name} was {what}, ...")
            changes.append(_ONE_SHAPE)
    cause = f": {'; '.join(causes)}" if causes else ""
    change = "\n".join(dict.fromkeys(changes)) or (
        "Pass the same shapes and dtypes in every call, and tensors instead of Python numbers."
    )
    return ScriptFinding(
        kind="retracing",
        place=function.place,
        observation=f"{function.name} was traced {function.traces} times in {function.calls} calls, for "
        f"{function.trace_s:.2g} s in total{cause}",
        why="Each trace runs the Python code again, and builds and optimizes a new graph.",
        change=change,
        gain=_gain_of_traces(function, process),
        sure="measured",
    )


_ONE_SHAPE = (
    "@tf.function(reduce_retracing=True)  # or batches of the same shape: drop_remainder=True if the "
    "first axis changes, padded_batch to a few lengths if another axis changes"
)


def _changing(causes: tuple[Mapping[str, str], ...]) -> list[tuple[str, list[str]]]:
    """The arguments that changed, each with its distinct values; those with the largest number of values first."""
    values: dict[str, dict[str, None]] = {}
    for cause in causes:
        for name, value in cause.items():
            values.setdefault(name, {})[value] = None
    changed = [(name, list(found)) for name, found in values.items() if len(found) > 1]
    return sorted(changed, key=lambda each: -len(each[1]))[:MAX_NAMED]


def _gain_of_traces(function: Function, process: WatchedProcess) -> tuple[float, float]:
    trained_s = sum(loop.period_s + loop.first_s for loop in process.loops)
    return gain_of(function.trace_s / max(trained_s, function.trace_s, 1e-9), min_saved=0.5)
