"""One setting of an experiment, opened to be measured: what a trial can be asked."""

from __future__ import annotations

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
from stoker.cluster.doctor.gpu_watch import watched_gpus
from stoker.core.config import build
from stoker.core.files import remove
from stoker.tune.levers import Situation, other_precision

if TYPE_CHECKING:
    from stoker.data.user_dataset.features import AnyTransform
    from stoker.train.config import ResolvedTraining, TrainConfig
    from stoker.train.context.run_context import RunContext
    from stoker.train.measurement.probe import Probe
    from stoker.train.measurement.window import Kind
    from stoker.train.setup.strategy import Distribution

OF_A_CLUSTER = ("multi_worker", "parameter_server")
"""Strategies that a trial, one process, replaces by what fits this machine."""


class _TrialListener:
    """Forwards every line of the chain to the trial's client."""

    def __init__(self, log: Callable[[str], None]) -> None:
        self.log = log

    def stage_began(self, stage: str) -> None:
        self.log(stage)

    def progress(self, line: str, share: float | None) -> None:
        self.log(line if share is None else f"{line} ({share:.0%})")

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

    def __init__(self, spec: Mapping[str, Any], log: Callable[[str], None]) -> None:
        """Know what is to be measured.

        Args:
            spec: `base`, the experiment as it is, and `settings`, what is to be measured, YAML;
                `scratch`, where its own files lie until its end.
            log: Receives progress lines.
        """
        self._base = build(Experiment, yaml.safe_load(spec["base"]))
        self._experiment = _in_one_process(build(Experiment, yaml.safe_load(spec["settings"])))
        self._log = log
        self._at_end = ExitStack()
        self._probe: Probe | None = None
        self._as_set: Any = None
        self._prepared: tuple[Context, AnyTransform, ResolvedTraining, Distribution] | None = None
        self._scratch = Path(spec["scratch"])
        self._scratch.mkdir()
        self._at_end.callback(remove, self._scratch)

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
            "rows_a_step": run.compiled.source.rows_per_step,
            "steps_per_call": run.compiled.resolved.steps_per_call,
            "together": run.position.steps_per_program,
            "first_pass_s": probe.first_pass_s,
            "parameters": run.built.model.count_params(),
            "checkpoint_s": probe.checkpoint_s(),
            "communication_s": probe.communication_s(),
            "transfer_s": probe.transfer_s(),
            "situation": asdict(self._situation(run.position.per_epoch)),
        }

    def window(self, kind: Any, seconds: float) -> dict[str, Any]:
        """One window."""
        return asdict(self._measured().window(kind, seconds))

    def turns(self, seconds: float, count: int, pace_s: float) -> dict[str, list[Any]]:
        """Windows of the resident step and of training in turn, so that both see the same machine.

        Behind each pair the machine's own pace is measured for `pace_s`.
        """
        probe = self._measured()
        paces, turns = [], []
        for number in range(count):
            # Whoever comes second in a pair meets a machine that the other has warmed.
            kinds: tuple[Kind, Kind] = ("resident", "real")
            if number % 2:
                kinds = ("real", "resident")
            found = {kind: asdict(probe.window(kind, seconds)) for kind in kinds}
            turns.append([found["resident"], found["real"]])
            paces.append(probe.machine_speed(pace_s))
        return {"paces": paces, "turns": turns}

    def curve(self, seed: int, steps: int, every: int) -> list[float]:
        """Mean losses of stretches of `every` steps, of a training with another seed."""
        from stoker.train.measurement.measured_run import open_measured_run, train_for

        kept = _Losses()
        settings, resolved = self._again(seed=seed)
        resolved = replace(resolved, steps_per_call=min(every, resolved.steps_per_call))
        with open_measured_run(**self._parts(settings, resolved, writer=kept)) as (run, opened):
            train_for(run, opened, steps=steps)
        return _by_stretch(kept.found, run.compiled.resolved.steps_per_call, every)

    def precision(self, seconds: float, count: int) -> dict[str, Any]:
        """Speeds of the step in memory as it is and in another precision, in turn."""
        from stoker.train.measurement.measured_run import open_measured_run
        from stoker.train.measurement.probe import open_probe

        probe = self._measured()
        other = other_precision(self._situation(1))
        settings, resolved = self._again(precision=other)
        parts = self._parts(settings, resolved, writer=_Losses())
        with open_measured_run(**parts) as measured, open_probe(*measured) as second:
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

    def findings(self) -> list[dict[str, str]]:
        """Avoidable costs in the model itself."""
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

    def machine(self, seconds: float) -> dict[str, Any]:
        """What the model computes, what this device reaches, memory, and the GPUs while it trains."""
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

    def device(self, seconds: float) -> dict[str, Any]:
        """Device time by kernel class during training; only `why` if there is none."""
        from stoker.measure.device_events import TraceError
        from stoker.measure.device_trace import can_trace, time_in, traced
        from stoker.train.model.layer_paths import layer_types

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

    def _again(self, *, seed: int | None = None, precision: Any = None) -> Any:
        """The settings of a second training in this process, which is prepared for it."""
        from stoker.train.setup.build_model import prepare_process

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
        """What `open_measured_run` takes."""
        from stoker.app.training.stage import callbacks_of, open_and_build
        from stoker.train.callbacks.callbacks import writes_files
        from stoker.train.step.user_hooks import apply_user_hooks, needs_every_train_step

        context, transform, _, place = self._open()
        context = replace(context, experiment=replace(context.experiment, train=settings))
        dataset, built = open_and_build(context, transform, place)
        listed = callbacks_of(context.experiment)
        resolved = apply_user_hooks(resolved, settings, model=built.model, callbacks=listed)
        # Those that are told of each step are a part of it; no file of the user's is written.
        heard = [c for c in listed if needs_every_train_step(c) and not writes_files(c)]
        return {
            "built": built,
            "data": (dataset, transform),
            "config": settings,
            "resolved": resolved,
            "distribution": place,
            "context": replace(self._context(writer), callbacks=heard),
        }

    def _situation(self, per_epoch: int) -> Situation:
        from stoker.app.trial.situation import situation_of

        context, transform, _, _ = self._open()
        probe = self._measured()
        return situation_of(
            context,
            transform,
            self._as_set,
            model=probe.run.built.model,
            per_epoch=per_epoch,
            made_here=probe.made_here,
        )

    def _open(self) -> tuple[Context, AnyTransform, ResolvedTraining, Distribution]:
        if self._prepared is None:
            experiment = self._experiment
            data_only = replace(self._base, data=experiment.data)
            listener = _TrialListener(self._log)
            import_tensorflow(compiles=True)
            from stoker.train.setup.strategy import claim_devices

            # Before a stage makes TensorFlow look at its devices by the settings as they are.
            claim_devices(experiment.train)
            chain = run_chain(data_only, listener, until="transform")
            from stoker.app.training.resolution import resolve_here
            from stoker.app.training.stage import begin_process
            from stoker.cluster.devices import find_devices

            context = chain.context(experiment, listener.progress)
            transform = context.transform()
            resolved = resolve_here(context, transform, find_devices(), None)
            place = begin_process(experiment.train, resolved)
            self._prepared = context, transform, resolved, place
        return self._prepared

    def _measured(self) -> Probe:
        if self._probe is None:
            from stoker.train.measurement.measured_run import open_measured_run
            from stoker.train.measurement.probe import open_probe

            context, _, resolved, _ = self._open()
            parts = self._parts(context.experiment.train, resolved, writer=_Losses())
            # The probe may make calls shorter; what can be changed is what is set.
            self._as_set = parts["resolved"]
            measured = self._at_end.enter_context(open_measured_run(**parts))
            self._probe = self._at_end.enter_context(open_probe(*measured))
        return self._probe

    def _context(self, writer: _Losses) -> RunContext:
        from stoker.app.training.stage import service_of
        from stoker.cluster.devices import find_devices
        from stoker.train.context.heartbeat import process_heartbeat
        from stoker.train.context.preemption import Preemption
        from stoker.train.context.run_context import RunContext

        context, _, resolved, _ = self._open()
        return RunContext(
            memory_bytes=find_devices().memory_bytes,
            checkpoints=self._scratch / "checkpoints",
            writer=writer,
            on_progress=lambda _: None,
            preemption=Preemption(),
            heartbeat=process_heartbeat(),
            service=service_of(context.experiment, resolved),
            work_dir=self._scratch / "cache",
        )


def _in_one_process(experiment: Experiment) -> Experiment:
    if experiment.train.strategy not in OF_A_CLUSTER:
        return experiment
    return replace(experiment, train=replace(experiment.train, strategy="auto"))


def _by_stretch(losses: list[float], per_call: int, every: int) -> list[float]:
    """Means of calls -> means of stretches, of equal calls."""
    calls = max(1, every // per_call)
    whole = len(losses) // calls * calls
    return [sum(losses[at : at + calls]) / calls for at in range(0, whole, calls)]
