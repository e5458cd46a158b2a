"""Silent errors on machines with GPUs: idle GPUs, or idle 16-bit units."""

from __future__ import annotations

from collections.abc import Iterator

from stoker.measure.findings import StepFacts, device_finding
from stoker.scriptprofile.facts import WatchedProcess
from stoker.scriptprofile.loops import FitLoop, Loop
from stoker.scriptprofile.observations import Place, to_place
from stoker.scriptprofile.rules.finding import DEVICE_TIME, ScriptFinding

MULTIPLE = 8
"""The sides of 16-bit matrix products must be multiples of this, or tensor cores need padding.

Source: NVIDIA, Deep Learning Performance: Matrix Multiplication, "Tensor Core requirements".
"""

NAMED = 3
"""Maximum number of layers that a finding names; the other layers are only counted."""


def gpu_findings(loop: Loop, process: WatchedProcess) -> Iterator[ScriptFinding]:
    """Return the findings about the devices on which a loop trains. Not yet checked on a GPU."""
    yield from _device_time(loop)
    yield from _cpu_op(loop, process)
    if isinstance(loop, FitLoop):
        yield from _one_of_several(loop, process)
        yield from _xla_not_used(loop, process)
        yield from _tensor_cores(loop, process)


def _device_time(loop: Loop) -> Iterator[ScriptFinding]:
    if loop.device is None:
        return
    facts = StepFacts(
        of_script=True,
        mfu=loop.mfu,
        precision=str(loop.model.get("policy", "")),
        xla=bool(loop.model.get("jit_compile") or loop.step.get("compiled")),
        steps_per_call=loop.model.get("steps_per_execution"),
        input_wait=loop.wait,
    )
    found = device_finding(loop.device, facts)
    if found is not None:
        yield ScriptFinding(
            kind=DEVICE_TIME,
            place=_line_of(loop, found.layer),
            observation=found.observation,
            why=found.why,
            change=found.change,
            # An upper bound: it assumes that the whole share disappears.
            gain=(1.0, found.most_gain),
            sure="measured",
        )


def _line_of(loop: Loop, layer: str) -> Place:
    """The line that created a layer; if unknown, the line of the loop."""
    lines = {name: to_place(at) for name, _, *at in loop.trace.get("layers", ())}
    return lines.get(layer) or loop.place


def _one_of_several(loop: Loop, process: WatchedProcess) -> Iterator[ScriptFinding]:
    # If the model was created outside a strategy's scope, another rule reports that.
    several = any(replicas > 1 for _, _, replicas in process.strategies)
    devices = loop.model.get("devices", ())
    if process.gpus < 2 or several or loop.model.get("replicas", 1) > 1 or len(devices) != 1:
        return
    yield ScriptFinding(
        kind="one_gpu_of_several",
        place=loop.made_at,
        observation=f"TensorFlow sees {process.gpus} GPUs, and every variable of the model is on {devices[0]}",
        why="Without a strategy, only one GPU trains; the others are idle, but their memory is allocated.",
        change="strategy = tf.distribute.MirroredStrategy()\nwith strategy.scope():\n    model = ...\n"
        "    model.compile(...)  # multiply the batch size by the number of GPUs",
        gain=(1.0, float(process.gpus)),
        sure="measured",
    )


def _cpu_op(loop: Loop, process: WatchedProcess) -> Iterator[ScriptFinding]:
    if not process.gpus or loop.reached is None or not loop.reached.on_cpu:
        return
    yield ScriptFinding(
        kind="cpu_op",
        place=loop.made_at,
        observation=loop.reached.on_cpu,
        why="Their inputs and results are copied from the GPU and back, and each step waits for the copies.",
        change="Remove tf.device from the model, or replace operations that have no GPU kernel.",
        gain=(1.0, 2.0),
        sure="possible",
    )


def _xla_not_used(loop: Loop, process: WatchedProcess) -> Iterator[ScriptFinding]:
    eager = loop.model.get("run_eagerly") or process.functions_run_eagerly
    if loop.model.get("jit_requested") is not True or (loop.model.get("jit_compile") and not eager):
        return
    yield ScriptFinding(
        kind="xla_not_used",
        place=loop.compiled_at,
        observation="jit_compile=True was set, but the step is not compiled"
        + (": it runs eagerly" if eager else ""),
        why="Keras does not use XLA if the step runs eagerly, and warns about it only once.",
        change="Remove run_eagerly=True and tf.config.run_functions_eagerly(True).",
        gain=None,
        sure="measured",
    )


def _tensor_cores(loop: Loop, process: WatchedProcess) -> Iterator[ScriptFinding]:
    if not process.gpus or not str(loop.model.get("policy", "")).startswith("mixed"):
        return
    missing = [
        (layer, wrong)
        for layer in loop.model.get("kernels", ())
        if (wrong := [f"{side}" for side in layer["sides"] if side % MULTIPLE])
    ]
    if not missing:
        return
    named = [f"{layer['name']} ({', '.join(wrong)})" for layer, wrong in missing[:NAMED]]
    more = f" and {len(missing) - NAMED} more" if len(missing) > NAMED else ""
    yield ScriptFinding(
        kind="tensor_core_shapes",
        place=to_place(missing[0][0]["place"]) or loop.place,
        observation=f"16-bit products have sides that are not multiples of {MULTIPLE}: "
        f"{', '.join(named)}{more}",
        why="Tensor cores compute whole tiles: other sides are padded, or computed without tensor cores.",
        change=f"Round units, channels and batch size up to multiples of {MULTIPLE}.",
        gain=(1.0, 2.0),
        sure="possible",
    )
