"""`python -m stoker.app.trial SPEC.json ASKS ANSWERS PARENT`: measures one setting of an experiment.

What it is asked comes as a JSON line on the descriptor ASKS, what it answers goes as one to ANSWERS:
the user's code may print what it likes. It ends when ASKS is closed, or whoever asks is gone.
"""

from __future__ import annotations

import ctypes
import functools
import json
import math
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TextIO

import yaml

from stoker.app.chain import StageOutcome, run_chain
from stoker.app.context import Context
from stoker.app.experiment import Experiment
from stoker.app.quiet import import_tensorflow
from stoker.cluster.machine.gpu_watch import watched_gpus
from stoker.core.config import build
from stoker.core.errors import EXIT_BUG, EXIT_DONE, UserError
from stoker.core.files import read_json
from stoker.tune.levers import Situation, other_precision

if TYPE_CHECKING:
    from stoker.data.own.features import AnyTransform
    from stoker.train.config import ResolvedTraining, TrainConfig
    from stoker.train.probe import Probe
    from stoker.train.strategy import Distribution
    from stoker.train.surroundings import Surroundings

OF_A_CLUSTER = ("multi_worker", "parameter_server")
"""Strategies that a trial, one process, replaces by what fits this machine."""


SIGNS_OF_XLA = ("tf2xla conversion failed", "XLA_CPU_JIT", "XLA_GPU_JIT")
"""What TensorFlow says of a graph that XLA is to compile, and cannot."""

REASONS_OF_XLA = ("XLA_CPU_JIT", "XLA_GPU_JIT", "compile-time constant", "nsupported")
"""In the line that says why."""

LONGEST_LINE = 300
"""Characters of it."""

PR_SET_PDEATHSIG = 1
"""Source: linux/prctl.h; prctl(2)."""

PARENT_POLL_S = 0.5
"""How often a trial looks whether whoever asks it is still there."""


class _Told:
    """A listener that passes on what the chain says."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say

    def stage_began(self, stage: str) -> None:
        self.say(stage)

    def progress(self, line: str, share: float | None) -> None:
        self.say(line if share is None else f"{line} ({share:.0%})")

    def stage_ended(self, outcome: StageOutcome) -> None:
        """Nobody waits for it."""


class _Losses:
    """A metric writer that keeps the losses."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def write(self, step: int, scalars: Mapping[str, float]) -> None:  # noqa: ARG002 - a writer's
        if "loss" in scalars:
            self.found.append(float(scalars["loss"]))

    def rewind(self, step: int, *, validated: bool = True) -> None:
        """Nothing was written before."""

    def close(self) -> None:
        """Nothing is open."""


class Session:
    """One setting of an experiment, opened as far as what is asked needs it."""

    def __init__(self, spec: Mapping[str, Any], say: Callable[[str], None]) -> None:
        """Know what is to be measured.

        Args:
            spec: `base`, the experiment as it is, and `settings`, what is to be measured, YAML.
            say: Told what goes on.
        """
        self._base = build(Experiment, yaml.safe_load(spec["base"]))
        self._experiment = _in_one_process(build(Experiment, yaml.safe_load(spec["settings"])))
        self._say = say
        self._at_end = ExitStack()
        self._probe: Probe | None = None
        self._as_set: Any = None
        self._prepared: tuple[Context, AnyTransform, ResolvedTraining, Distribution] | None = None
        self._scratch = Path(self._at_end.enter_context(TemporaryDirectory(prefix="stoker-trial-")))

    def close(self) -> None:
        """Close the data."""
        self._at_end.close()

    def prepare(self) -> dict[str, Any]:
        """Run the stages before `train`, and begin the process; facts of the setting."""
        _, _, resolved, _ = self._open()
        from stoker.cluster.devices import find_devices

        return {"resolved": asdict(resolved), "devices": find_devices().describe()}

    def begin(self) -> dict[str, Any]:
        """Compile the step, and make ready to measure; facts of what is measured."""
        probe = self._measured()
        run = probe.run
        return {
            "per_epoch": run.position.per_epoch,
            "rows_a_step": run.rows_a_step,
            "steps_per_call": run.resolved.steps_per_call,
            "together": run.position.together,
            "first_pass_s": probe.first_pass_s,
            "parameters": run.built.model.count_params(),
            "checkpoint_s": probe.checkpoint_s(),
            "communication_s": probe.communication_s(),
            "transfer_s": probe.transfer_s(),
            "situation": asdict(self._situation(self._as_set, run.position.per_epoch)),
        }

    def window(self, kind: Any, seconds: float) -> dict[str, Any]:
        """One window."""
        return asdict(self._measured().window(kind, seconds))

    def turns(self, seconds: float, count: int) -> list[list[dict[str, Any]]]:
        """Windows of the resident step and of training in turn, so that both see the same machine."""
        probe = self._measured()
        return [
            [asdict(probe.window(kind, seconds)) for kind in ("resident", "real")]
            for _ in range(count)
        ]

    def curve(self, seed: int, steps: int, every: int) -> list[float]:
        """Mean losses of stretches of `every` steps, of a training with another seed."""
        from stoker.train.probe import open_measured, train_for

        kept = _Losses()
        settings, resolved = self._again(seed=seed)
        resolved = replace(resolved, steps_per_call=min(every, resolved.steps_per_call))
        with open_measured(**self._parts(settings, resolved, writer=kept)) as (run, opened):
            train_for(run, opened, steps=steps)
        return _by_stretch(kept.found, run.resolved.steps_per_call, every)

    def precision(self, seconds: float, count: int) -> dict[str, Any]:
        """Speeds of the step in memory as it is and in another precision, in turn."""
        from stoker.train.probe import open_measured, open_probe

        probe = self._measured()
        other = other_precision(self._situation(self._as_set, 1))
        settings, resolved = self._again(precision=other)
        parts = self._parts(settings, resolved, writer=_Losses())
        with open_measured(**parts) as measured, open_probe(*measured) as second:
            pairs = [
                [
                    each.window("resident", seconds)
                    for each in ((probe, second) if turn % 2 else (second, probe))
                ][:: 1 if turn % 2 else -1]
                for turn in range(count)
            ]
        return {
            "precision": other,
            "pairs": [[one.rows_per_s, two.rows_per_s] for one, two in pairs],
        }

    def timeline(self, calls: int) -> list[dict[str, Any]]:
        """Some calls of training, one after the other."""
        return self._measured().spans(calls)

    def stages(self) -> list[dict[str, Any]]:
        """What each stage of the input costs; empty where nothing is made for a sample."""
        return [asdict(stage) for stage in self._measured().stages()]

    def machine(self, seconds: float) -> dict[str, Any]:
        """What the model computes, what this device reaches, memory, and the GPUs while it trains."""
        import resource

        probe = self._measured()
        with watched_gpus() as gpus:
            probe.window("real", seconds)
        model = probe.run.built.model
        peak_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        reached = _reached(model, seconds=seconds)
        return reached | {"peak_memory_bytes": peak_bytes, "gpus": gpus()}

    def _again(self, *, seed: int | None = None, precision: Any = None) -> Any:
        """The settings of a second training in this process, which is prepared for it."""
        from stoker.train.model import prepare_process

        context, _, resolved, _ = self._open()
        settings = context.experiment.train
        settings = replace(settings, seed=settings.seed if seed is None else seed)
        resolved = replace(resolved, precision=precision or resolved.precision)
        prepare_process(
            precision=resolved.precision,
            seed=settings.seed,
            deterministic=settings.deterministic,
        )
        return settings, resolved

    def _parts(
        self, settings: TrainConfig, resolved: ResolvedTraining, *, writer: _Losses
    ) -> dict[str, Any]:
        """What `open_measured` takes."""
        from stoker.app.training import callbacks_of, open_and_build
        from stoker.train.callbacks import writes_files
        from stoker.train.own_code import as_own_code_needs, hears_every_step

        context, transform, _, place = self._open()
        context = replace(context, experiment=replace(context.experiment, train=settings))
        dataset, built = open_and_build(context, transform, place)
        listed = callbacks_of(context.experiment)
        resolved = as_own_code_needs(resolved, settings, model=built.model, callbacks=listed)
        # Those that are told of each step are a part of it; no file of the user's is written.
        heard = [c for c in listed if hears_every_step(c) and not writes_files(c)]
        return {
            "built": built,
            "dataset": dataset,
            "transform": transform,
            "config": settings,
            "resolved": resolved,
            "distribution": place,
            "around": replace(self._around(writer), callbacks=heard),
        }

    def _passes_agree(self) -> bool:
        from stoker.data.own.opening import OwnDataset
        from stoker.data.own.passes import passes_agree

        context, _, _, _ = self._open()
        dataset = context.dataset()
        return isinstance(dataset, OwnDataset) and passes_agree(dataset.datasets["train"])

    def _blocks(self) -> tuple[str, ...]:
        """Layers right below the model that hold layers themselves."""
        from stoker.train.layer_paths import walk_layers

        below = [path.split("/")[0] for path, _ in walk_layers(self._model()) if "/" in path]
        return tuple(dict.fromkeys(below))

    def _gradient_bytes(self, dtype: str) -> int:
        """Of one exchange between replicas."""
        import tensorflow as tf

        sizes = [weight.shape for weight in self._model().trainable_variables]
        return sum(math.prod(shape) for shape in sizes) * tf.as_dtype(dtype).size

    def _model(self) -> Any:
        return self._measured().run.built.model

    def _situation(self, resolved: ResolvedTraining, per_epoch: int) -> Situation:
        from stoker.app.training import service_of
        from stoker.cluster.devices import find_devices
        from stoker.train.config import BFLOAT16_CAPABILITY

        context, transform, _, _ = self._open()
        own = context.experiment.own_dataset
        devices, train = find_devices(), context.experiment.train
        gpus = devices.gpus
        return Situation(
            own_dataset=own is not None,
            passes_agree=own is not None and self._passes_agree(),
            image_store=None if own is not None else _store(context.shards().image_store),
            string_features=any(feature.dtype == "string" for feature in transform.features),
            gpus=len(gpus),
            cores=devices.cpu_cores,
            intra_op_threads=train.intra_op_threads,
            replicas=resolved.replicas,
            strategy=resolved.strategy,
            reduction_dtype=train.reduction_dtype,
            reduction_bytes_per_pack=train.reduction_bytes_per_pack,
            gradient_bytes=self._gradient_bytes(train.reduction_dtype),
            bfloat16=all(gpu.compute_capability >= BFLOAT16_CAPABILITY for gpu in gpus),
            precision=resolved.precision,
            xla=resolved.xla,
            steps_per_call=resolved.steps_per_call,
            per_epoch=per_epoch,
            batch_size=resolved.batch_size,
            batch_is_set=own is None,
            accumulate=resolved.accumulate,
            cached=own is not None and own.pipeline.cache == "memory",
            service=service_of(context.experiment, resolved) is not None,
            blocks=() if train.remat else self._blocks(),
        )

    def _open(self) -> tuple[Context, AnyTransform, ResolvedTraining, Distribution]:
        if self._prepared is None:
            experiment = self._experiment
            data_only = replace(self._base, data=experiment.data)
            listener = _Told(self._say)
            import_tensorflow()
            from stoker.train.strategy import claim_devices

            # Before a stage makes TensorFlow look at its devices by the settings as they are.
            claim_devices(experiment.train)
            chain = run_chain(data_only, listener, until="transform")
            from stoker.app.resolution import resolve_here
            from stoker.app.training import begin_process
            from stoker.cluster.devices import find_devices

            context = Context(
                experiment=experiment,
                run_id=chain.run.name,
                outputs={outcome.stage: outcome.output for outcome in chain.outcomes},
                identities={},
                results={outcome.stage: outcome.result for outcome in chain.outcomes},
                progress=listener.progress,
            )
            transform = context.transform()
            resolved = resolve_here(context, transform, find_devices(), None)
            place = begin_process(experiment.train, resolved)
            self._prepared = context, transform, resolved, place
        return self._prepared

    def _measured(self) -> Probe:
        if self._probe is None:
            from stoker.train.probe import open_measured, open_probe

            context, _, resolved, _ = self._open()
            parts = self._parts(context.experiment.train, resolved, writer=_Losses())
            # The probe may make calls shorter; what can be changed is what is set.
            self._as_set = parts["resolved"]
            measured = self._at_end.enter_context(open_measured(**parts))
            self._probe = self._at_end.enter_context(open_probe(*measured))
        return self._probe

    def _around(self, writer: _Losses) -> Surroundings:
        from stoker.app.training import service_of
        from stoker.cluster.devices import find_devices
        from stoker.train.ending import Ending
        from stoker.train.heartbeat import process_heartbeat
        from stoker.train.surroundings import Surroundings

        context, _, resolved, _ = self._open()
        return Surroundings(
            memory_bytes=find_devices().memory_bytes,
            checkpoints=self._scratch / "checkpoints",
            writer=writer,
            on_progress=lambda _: None,
            ending=Ending(),
            heartbeat=process_heartbeat(),
            service=service_of(context.experiment, resolved),
            work_dir=self._scratch / "cache",
        )


def _in_one_process(experiment: Experiment) -> Experiment:
    if experiment.train.strategy not in OF_A_CLUSTER:
        return experiment
    return replace(experiment, train=replace(experiment.train, strategy="auto"))


def _reached(model: Any, *, seconds: float) -> dict[str, Any]:
    """The operations of a step, and how many a second this device does of their kind."""
    from stoker.train.flops import count_flops
    from stoker.train.peak_flops import measure_peak_flops

    try:
        flops = count_flops(model)
    except UserError as error:
        return {"step_flops_per_sample": None, "peak_flops_per_s": None, "why": error.line()}
    peak = measure_peak_flops(model.compute_dtype, seconds=seconds)
    rates = {
        "convolutions": (flops.in_convolutions, peak.convolutions_per_s),
        "products of matrices": (flops.in_products, peak.products_per_s),
    }
    counted = {name: (work, rate) for name, (work, rate) in rates.items() if work}
    least_s = sum(work / rate for work, rate in counted.values())
    return {
        "step_flops_per_sample": flops.step_per_sample,
        "not_counted": list(flops.not_counted),
        # Each kind at its own peak.
        "peak_flops_per_s": sum(work for work, _ in counted.values()) / least_s
        if least_s
        else None,
        "peak_of": " and ".join(counted) + f" in {peak.dtype}",
    }


def _store(told: str | None) -> str | None:
    """`original (as it came)` -> `original`."""
    return None if told is None else told.split()[0]


def _by_stretch(losses: list[float], per_call: int, every: int) -> list[float]:
    """Means of calls -> means of stretches, of equal calls."""
    calls = max(1, every // per_call)
    whole = len(losses) // calls * calls
    return [sum(losses[at : at + calls]) / calls for at in range(0, whole, calls)]


def answer_of(asked: Callable[[], Any]) -> dict[str, Any]:
    """What was asked, or why there is no answer."""
    try:
        return {"answer": asked()}
    except UserError as error:
        memory = "must fit" in error.rule or "memory" in error.rule
        return {"failed": "memory" if memory else "refused", "text": error.line()}
    except MemoryError:
        return {"failed": "memory", "text": "Python ran out of memory"}
    except Exception as error:  # noqa: BLE001 - the edge: a trial that fails is a result
        traceback.print_exc()
        if (why := _refused_by_xla(str(error))) is not None:
            return {"failed": "refused", "text": why}
        memory = type(error).__name__ == "ResourceExhaustedError"
        text = str(error).strip().splitlines()[0] if str(error).strip() else ""
        return {
            "failed": "memory" if memory else "crash",
            "text": f"{type(error).__name__}: {text}",
        }


def _refused_by_xla(text: str) -> str | None:
    """TensorFlow's line on a graph that XLA does not compile; None where it says nothing of XLA."""
    if not any(sign in text for sign in SIGNS_OF_XLA):
        return None
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    said = (line for line in lines if any(why in line for why in REASONS_OF_XLA))
    # The operation's place in the graph stands behind the reason once more.
    line = re.sub(r"\)\{\{node [^}]*\}\}", ")", next(said, lines[0]))
    return re.sub(r"\{\{node ([^}]*)\}\}", r"\1", line)[:LONGEST_LINE]


def end_with(parent: int) -> None:
    """Watch, from a thread, whether the process that asks is still there; end with it.

    The kernel kills it too: no thread of it sees anything while it is paused.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_POLL_S)  # between two looks
        os._exit(EXIT_BUG)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def main(spec: Path, asks: TextIO, answers: TextIO) -> int:
    """Answer until nobody asks any more; the exit code."""

    def send(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    session = Session(read_json(spec), lambda line: send({"told": line}))
    try:
        for line in asks:
            asked = json.loads(line)
            work = functools.partial(getattr(session, asked.pop("ask")), **asked)
            answer = answer_of(work)
            send(answer)
            if "failed" in answer:
                return EXIT_BUG
    finally:
        session.close()
    return EXIT_DONE


if __name__ == "__main__":
    end_with(int(sys.argv[4]))
    with os.fdopen(int(sys.argv[2])) as _asks, os.fdopen(int(sys.argv[3]), "w") as _answers:
        code = main(Path(sys.argv[1]), _asks, _answers)
    sys.stdout.flush()
    sys.stderr.flush()
    # What TensorFlow has under way is nobody's any more.
    os._exit(code)
