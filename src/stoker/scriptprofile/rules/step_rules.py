"""Avoidable costs of the step itself, and silent errors of the model."""

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
"""Traces of one function without a finding: two for its first call that creates variables, and an epoch's short batch."""

PASSING_CALLS = 5
"""Calls of one tf.function: one that is made in a loop is called no more often."""

MAX_NAMED = 3
"""Number of changed arguments that are named."""

SYNC_SHARE = 0.8
"""Share of a loop's steps that read a value, from which on every step counts as reading it."""

MIN_SYNCS = 20
"""With fewer steps, this says nothing."""


def step_findings(loop: Loop, process: WatchedProcess) -> Iterator[ScriptFinding]:
    """Findings about a loop's step."""
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
        "why": "Python starts each operation by itself, and TensorFlow can neither fuse nor order "
        "them.",
        "gain": gain_of(max(0.5, share), least=0.5),
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
                observation=f"{count} of {loop.steps} steps computed their gradients outside of any "
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
        observation=f"{count} values were read from tensors in {loop.steps} steps, which took {took:.1%} of "
        "their time" + ("" if gpus else " (on a GPU it would cost more)"),
        why="Python waits until the device has ended the step, so that the next one is not prepared "
        "meanwhile.",
        change="Keep the tensor (total += loss), and read it once every 100 steps: "
        "if step % 100 == 0: print(float(loss))",
        gain=gain_of(took, least=0.0) if not gpus else gain_of(min(0.5, took), least=0.1),
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
            "becomes unstable, or stands still.",
            change='keras.layers.Dense(..., dtype="float32")  # the output layer alone',
            gain=None,
            sure="measured",
        )


def _float64_model(loop: Loop) -> Iterator[ScriptFinding]:
    if variables := loop.model.get("float64"):
        yield ScriptFinding(
            kind="float64_model",
            place=dtype_line(loop.made_at, "float64") or loop.made_at,
            observation=f"variables are float64: {', '.join(variables[:3])}",
            why="It takes twice the memory, and on a GPU up to 64 times the time, of float32.",
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
                observation=f"{kind} of {replicas} replicas was made in {place}, and this model was made "
                "outside of its scope: one device trains, and nothing says so",
                why="Keras takes the strategy from where the model is made; the other devices stay "
                "idle.",
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
        observation=f"keras.distribution is set to a {loop.model['keras_distribution']}, and this model trains "
        f"on {loop.model.get('replicas', 1)} replica: with TensorFlow it has no effect, and nothing "
        "says so",
        why="Keras hands a distribution to JAX only; TensorFlow trains as if it were not there.",
        change="strategy = tf.distribute.MirroredStrategy()\n"
        "with strategy.scope():\n    model = ...\n    model.compile(...)",
        gain=None,
        sure="measured",
    )


def function_findings(process: WatchedProcess) -> Iterator[ScriptFinding]:
    """Functions that were traced repeatedly."""
    for function in process.functions:
        # A function of each of several models is also made several times, but then called many times.
        is_passing = function.calls <= PASSING_CALLS * function.made
        if function.made > MAX_TRACES and function.traces > MAX_TRACES and is_passing:
            yield _made_again(function, process)
        elif function.traces > MAX_TRACES * function.made:
            yield _retraced(function, process)


def _made_again(function: Function, process: WatchedProcess) -> ScriptFinding:
    return ScriptFinding(
        kind="retracing",
        place=function.place,
        observation=f"{function.made} tf.functions were made of {function.name}, and each was traced again, "
        f"for {function.trace_s:.2g} s together",
        why="A trace belongs to its tf.function: one that is made in a loop starts from nothing.",
        change="Define the tf.function once, outside of the loop.",
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
                f"{function.name}(..., {name}=tf.constant({name}))  # a tensor is traced once"
            )
        else:
            causes.append(f"its argument {name} was {what}, ...")
            changes.append(_ONE_SHAPE)
    cause = f": {'; '.join(causes)}" if causes else ""
    change = "\n".join(dict.fromkeys(changes)) or (
        "Give every call the same shapes and dtypes, and no Python numbers."
    )
    return ScriptFinding(
        kind="retracing",
        place=function.place,
        observation=f"{function.name} was traced {function.traces} times in {function.calls} calls, for "
        f"{function.trace_s:.2g} s together{cause}",
        why="Each trace runs the Python again and builds and optimizes a new graph.",
        change=change,
        gain=_gain_of_traces(function, process),
        sure="measured",
    )


_ONE_SHAPE = (
    "@tf.function(reduce_retracing=True)  # or batches of one shape: drop_remainder=True where the "
    "first axis changes, padded_batch to a few lengths where another one does"
)


def _changing(causes: tuple[Mapping[str, str], ...]) -> list[tuple[str, list[str]]]:
    """The changed arguments, those with the most different values first, with these values."""
    values: dict[str, dict[str, None]] = {}
    for cause in causes:
        for name, value in cause.items():
            values.setdefault(name, {})[value] = None
    changed = [(name, list(found)) for name, found in values.items() if len(found) > 1]
    return sorted(changed, key=lambda each: -len(each[1]))[:MAX_NAMED]


def _gain_of_traces(function: Function, process: WatchedProcess) -> tuple[float, float]:
    trained_s = sum(loop.period_s + loop.first_s for loop in process.loops)
    return gain_of(function.trace_s / max(trained_s, function.trace_s, 1e-9), least=0.5)
