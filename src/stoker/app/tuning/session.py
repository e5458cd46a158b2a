"""Runs in the child process of a trial: opens the experiment with the trial's settings, and measures it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from stoker.app.chain import StageOutcome, run_chain
from stoker.app.context import Context
from stoker.app.experiment import Experiment
from stoker.app.import_tensorflow import import_tensorflow
from stoker.app.task.worker_process import WorkerSpec, ignore_progress
from stoker.app.task.workers_stage import spec_of
from stoker.cluster.devices import find_devices
from stoker.cluster.doctor.visible import watched_gpus
from stoker.core.config import build
from stoker.core.files import remove
from stoker.tune.levers import ModelFacts, other_precision

if TYPE_CHECKING:
    from stoker.data.user_dataset.features import AnyTransform
    from stoker.train.config import ResolvedTraining, TrainConfig
    from stoker.train.context.run_context import RunContext
    from stoker.train.measurement.measured_run import Kind
    from stoker.train.measurement.probe import Probe
    from stoker.train.setup.strategy import Distribution

Log = Callable[[str], None]
"""Receives progress lines."""


class _Listener:
    """Forwards every line of the chain."""

    def __init__(self, log: Log) -> None:
        self.log = log

    def stage_began(self, stage: str) -> None:
        self.log(stage)

    def progress(self, line: str, share: float | None) -> None:
        self.log(line if share is None else f"{line} ({share:.0%})")

    def stage_ended(self, outcome: StageOutcome) -> None:
        """Do nothing, because the next stage is reported when it begins."""


class Preparation:
    """Runs the stages before `train`, in a separate process, which frees its devices when it exits."""

    def __init__(self, spec: Mapping[str, Any], log: Log) -> None:
        """Read the experiment.

        Args:
            spec: A dict with `experiment`, the experiment as YAML.
            log: Receives progress lines.
        """
        self._experiment = build(Experiment, yaml.safe_load(spec["experiment"]))
        self._log = log

    def prepare(self) -> dict[str, Any]:
        """Run the stages; return the input of a trial, a `WorkerSpec` as JSON values."""
        listener = _Listener(self._log)
        chain = run_chain(self._experiment, listener, until="transform")
        return asdict(spec_of(chain.context(self._experiment, listener.progress), Path()))

    def close(self) -> None:
        """Do nothing, because the chain has closed its files."""


class _Losses:
    """A metric writer that keeps the losses."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def write(self, step: int, scalars: Mapping[str, float]) -> None:  # noqa: ARG002 - a writer's
        if "loss" in scalars:
            self.found.append(float(scalars["loss"]))

    def rewind(self, step: int, *, validated: bool = True) -> None:
        """Do nothing, because this writer has no earlier output."""

    def close(self) -> None:
        """Do nothing, because no file is open."""


class Session:
    """Measures an experiment with the settings of one trial; each question opens only what it needs."""

    def __init__(self, spec: Mapping[str, Any], log: Log) -> None:  # noqa: ARG002 - as `Preparation`
        """Read the experiment and the outputs of the stages before `train`.

        Args:
            spec: A `WorkerSpec` as JSON values; its folder is the scratch folder.
            log: Receives progress lines.
        """
        worker = WorkerSpec(**spec)
        self._context = worker.context(ignore_progress)
        self._at_end = ExitStack()
        self._probe: Probe | None = None
        self._resolved: Any = None
        self._begun: tuple[AnyTransform, ResolvedTraining, Distribution] | None = None
        self._scratch = Path(worker.folder)
        self._scratch.mkdir()
        self._at_end.callback(remove, self._scratch)

    def close(self) -> None:
        """Close the data, and remove the scratch folder."""
        self._at_end.close()

    def begin(self) -> dict[str, Any]:
        """Compile the step and prepare to measure; return facts about the training."""
        probe = self._measured()
        run = probe.run
        facts = {
            "per_epoch": run.position.per_epoch,
            "rows_a_step": run.compiled.source.rows_per_step,
            "steps_per_call": run.compiled.resolved.steps_per_call,
            "checkpoint_s": probe.checkpoint_s(),
            "communication_s": probe.communication_s(),
            "transfer_s": probe.transfer_s(),
        }
        # Return `self._resolved`, not the run's copy: in the copy, the probe may have reduced `steps_per_call`.
        return {"facts": facts, "resolved": asdict(self._resolved), "model": self._model_facts()}

    def window(self, kind: Any, seconds: float) -> dict[str, Any]:
        """Measure one window."""
        return asdict(self._measured().window(kind, seconds))

    def turns(self, seconds: float, count: int, pace_s: float) -> dict[str, list[Any]]:
        """Measure pairs of windows: of the step with resident data, and of training.

        The windows of a pair follow each other directly, so that both see the machine in the same state.
        After each pair, the machine's own speed is measured for `pace_s` seconds.
        """
        probe = self._measured()
        paces, turns = [], []
        for number in range(count):
            # The order changes from pair to pair, because the second window of a pair runs on a machine warmed up by
            # the first.
            kinds: tuple[Kind, Kind] = ("resident", "real")
            if number % 2:
                kinds = ("real", "resident")
            found = {kind: asdict(probe.window(kind, seconds)) for kind in kinds}
            turns.append([found["resident"], found["real"]])
            paces.append(probe.machine_speed(pace_s))
        return {"paces": paces, "turns": turns}

    def curve(self, seed: int, steps: int, every: int) -> list[float]:
        """Train with another seed, and return the mean loss of each group of `every` steps."""
        from stoker.train.measurement.measured_run import open_measured_run, train_for

        losses = _Losses()
        settings, resolved = self._second_training(seed=seed)
        resolved = replace(resolved, steps_per_call=min(every, resolved.steps_per_call))
        with open_measured_run(**self._parts(settings, resolved, writer=losses)) as (run, opened):
            train_for(run, opened, steps=steps)
        calls = max(1, every // run.compiled.resolved.steps_per_call)
        whole = len(losses.found) // calls * calls
        return [sum(losses.found[at : at + calls]) / calls for at in range(0, whole, calls)]

    def precision(self, seconds: float, count: int) -> dict[str, Any]:
        """Measure the step with resident data in pairs of windows: in the current precision and in another one."""
        from stoker.train.measurement.measured_run import open_measured_run
        from stoker.train.measurement.probe import open_probe

        probe = self._measured()
        other = other_precision(self._resolved.precision, find_devices().gpus)
        settings, resolved = self._second_training(precision=other)
        parts = self._parts(settings, resolved, writer=_Losses())
        pairs = []
        with open_measured_run(**parts) as measured, open_probe(*measured) as second:
            for number in range(count):
                order = (probe, second) if number % 2 else (second, probe)
                speeds = [each.window("resident", seconds).rows_per_s for each in order]
                pairs.append(speeds if number % 2 else speeds[::-1])
        return {"precision": other, "pairs": pairs}

    def explain(self, seconds: float, peak_s: float, calls: int) -> dict[str, Any]:
        """Return the facts of a profile other than the measured windows.

        Returns:
            `calls`: times of consecutive training calls. `stages`: the cost of each stage of the input.
            `machine`: see `_machine`. `findings`: avoidable costs in the model. `device`: see `_device_time`.
        """
        return {
            "calls": self._measured().spans(calls),
            "stages": [asdict(stage) for stage in self._measured().stages()],
            "machine": self._machine(peak_s),
            "findings": self._findings(),
            "device": self._device_time(seconds),
        }

    def _findings(self) -> list[dict[str, str]]:
        from stoker.measure.findings import useless_bias
        from stoker.scriptprofile.watcher.stoker_watch.model_facts import useless_biases

        model = self._measured().run.built.model
        layers = useless_biases(model)
        if not layers:
            return []
        found = useless_bias(
            [layer.name for layer in layers],
            parameters=sum(int(layer.bias.shape[0]) for layer in layers),
            of_parameters=model.count_params(),
        )
        return [asdict(found)]

    def _machine(self, seconds: float) -> dict[str, Any]:
        """Return the model's FLOPs, the device's peak rate, the process's peak memory, and GPU use during training."""
        import resource

        from stoker.measure.mfu import full_rates, model_rate

        probe = self._measured()
        with watched_gpus() as gpus:
            probe.window("real", seconds)
        peak_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        run = probe.run
        rate = model_rate(run.built.model, rates=full_rates(seconds), inputs=run.input_specs())
        reached = rate.to_json(devices=probe.run.distribution.replicas)
        return reached | {"peak_memory_bytes": peak_bytes, "gpus": gpus()}

    def _device_time(self, seconds: float) -> dict[str, Any]:
        """Return the device time by kernel class during training; if it cannot be measured, only the reason, `why`."""
        from stoker.measure.device_events import TraceError
        from stoker.measure.device_trace import can_trace, time_in, traced
        from stoker.train.model.keras_model import layer_types

        if not can_trace():
            return {"why": ""}
        probe = self._measured()
        layers = layer_types(probe.run.built.model)
        try:
            with traced(self._scratch) as trace:
                probe.window("real", seconds)
            return {"time": time_in(trace[0], layers=layers).to_json(), "why": ""}
        except TraceError as error:
            return {"why": str(error)}

    def _second_training(self, *, seed: int | None = None, precision: Any = None) -> Any:
        """Prepare this process for a second training, and return its settings."""
        from stoker.app.training.setup import seed_process

        _, resolved, _ = self._begin()
        settings = self._context.experiment.train
        settings = replace(settings, seed=settings.seed if seed is None else seed)
        resolved = replace(resolved, precision=precision or resolved.precision)
        seed_process(settings, resolved)
        return settings, resolved

    def _parts(
        self, settings: TrainConfig, resolved: ResolvedTraining, *, writer: _Losses
    ) -> dict[str, Any]:
        """Return the arguments of `open_measured_run`."""
        from stoker.app.training.setup import callbacks_of, open_and_build
        from stoker.train.callbacks.callbacks import writes_files
        from stoker.train.callbacks.hooks import apply_user_hooks, needs_every_train_step

        transform, _, place = self._begin()
        experiment = replace(self._context.experiment, train=settings)
        dataset, built = open_and_build(
            replace(self._context, experiment=experiment), transform, place
        )
        callbacks = callbacks_of(experiment)
        resolved = apply_user_hooks(resolved, settings, model=built.model, callbacks=callbacks)
        # Callbacks that need every step are part of a step's cost. Callbacks that write the user's files do not run.
        kept = [c for c in callbacks if needs_every_train_step(c) and not writes_files(c)]
        return {
            "built": built,
            "data": (dataset, transform),
            "config": settings,
            "resolved": resolved,
            "distribution": place,
            "context": replace(self._run_context(writer), callbacks=kept),
        }

    def _model_facts(self) -> dict[str, Any]:
        probe, (transform, _, _) = self._measured(), self._begin()
        experiment, model = self._context.experiment, probe.run.built.model
        train, results = experiment.train, self._context.results
        has_own = experiment.own_dataset is not None
        store = None if has_own else self._context.shards().image_store
        facts = ModelFacts(
            passes_agree=has_own and _passes_agree(self._context),
            # Drops a remark in parentheses: `original (as it came)` -> `original`.
            image_store=None if store is None else store.split()[0],
            made_here=probe.made_here,
            byte_features={} if train.feed.uint8 else results["analyze"].get("bytes", {}),
            string_features=any(feature.dtype == "string" for feature in transform.features),
            gradient_bytes=_gradient_bytes(model, train.reduction_dtype),
            per_epoch=probe.run.position.per_epoch,
            blocks=() if train.remat else _blocks(model),
        )
        return asdict(facts)

    def _begin(self) -> tuple[AnyTransform, ResolvedTraining, Distribution]:
        if self._begun is None:
            import_tensorflow(compiles=True)
            from stoker.app.training.setup import begin_process, resolve_here
            from stoker.train.setup.strategy import claim_devices

            train = self._context.experiment.train
            # Must run before TensorFlow initializes its devices.
            claim_devices(train)
            transform = self._context.transform()
            resolved = resolve_here(self._context, transform, find_devices(), None)
            self._begun = transform, resolved, begin_process(train, resolved)
        return self._begun

    def _measured(self) -> Probe:
        if self._probe is None:
            _, resolved, _ = self._begin()
            from stoker.train.measurement.measured_run import open_measured_run
            from stoker.train.measurement.probe import open_probe

            parts = self._parts(self._context.experiment.train, resolved, writer=_Losses())
            self._resolved = parts["resolved"]
            measured = self._at_end.enter_context(open_measured_run(**parts))
            self._probe = self._at_end.enter_context(open_probe(*measured))
        return self._probe

    def _run_context(self, writer: _Losses) -> RunContext:
        from stoker.app.training.setup import service_of
        from stoker.train.context.heartbeat import process_heartbeat
        from stoker.train.context.preemption import Preemption
        from stoker.train.context.run_context import RunContext

        _, resolved, _ = self._begin()
        return RunContext(
            memory_bytes=find_devices().memory_bytes,
            checkpoints=self._scratch / "checkpoints",
            writer=writer,
            on_progress=lambda _: None,
            preemption=Preemption(),
            heartbeat=process_heartbeat(),
            service=service_of(self._context.experiment, resolved),
            work_dir=self._scratch / "cache",
        )


def _passes_agree(context: Context) -> bool:
    from stoker.data.user_dataset.feed import passes_agree
    from stoker.data.user_dataset.load_dataset import OwnDataset

    dataset = context.dataset()
    return isinstance(dataset, OwnDataset) and passes_agree(dataset.datasets["train"])


def _blocks(model: Any) -> tuple[str, ...]:
    """Return the layers directly below the model that contain layers (blocks)."""
    from stoker.train.model.keras_model import walk_layers

    below = [path.split("/")[0] for path, _ in walk_layers(model) if "/" in path]
    return tuple(dict.fromkeys(below))


def _gradient_bytes(model: Any, dtype: str) -> int:
    """Return the bytes of gradients that replicas exchange in one step."""
    import tensorflow as tf

    sizes = [weight.shape for weight in model.trainable_variables]
    return sum(math.prod(shape) for shape in sizes) * tf.as_dtype(dtype).size
