"""A dry run of training: runs two steps, and exports, loads and calls the untrained model.

It finds errors before the first epoch: a model that cannot be trained, does not fit in memory or cannot be served.
Only the stages before `train` are recorded.
"""

from __future__ import annotations

import itertools
import math
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.app.chain import Listener, StageOutcome, run_chain
from stoker.app.experiment import Experiment
from stoker.app.import_tensorflow import import_tensorflow
from stoker.app.stage_outputs import split_rows
from stoker.cluster.devices import find_devices
from stoker.core.errors import CheckFailed, ConfigError, Plain, UserError
from stoker.core.user_code import call

if TYPE_CHECKING:
    from stoker.data.user_dataset.features import AnyTransform
    from stoker.data.user_dataset.load_dataset import AnyDataset
    from stoker.train.config import ResolvedTraining, TrainConfig
    from stoker.train.health.step_operations import DevicePlacement
    from stoker.train.setup.build_model import BuiltModel
    from stoker.train.setup.strategy import Distribution
    from stoker.train.watch.footprint import Footprint

STEPS = 2
"""Number of steps: the first one traces and compiles, the second one runs the compiled program."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """Result of the two steps."""

    resolved: ResolvedTraining
    """The value of every `auto`."""

    footprint: Footprint
    """Memory of a replica."""

    placed: list[DevicePlacement]
    """Devices of variables and operations."""

    losses: list[float]
    """Mean loss of each step."""

    first_step_s: float
    """Wall time of the first step with tracing and compilation, seconds."""

    second_step_s: float
    """Wall time of the second step, seconds."""

    peak_bytes: dict[str, int]
    """GPU -> peak of the memory that TensorFlow used on it; empty without a GPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """The untrained model, as a server loads it."""

    signatures: list[str]
    """Signatures that were called."""

    outputs: list[str]
    """Names of the outputs."""

    size_bytes: int
    """Size of the SavedModel."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DryRunResult:
    """Result of a dry run."""

    run: str
    """Folder of the run with the stages before `train`."""

    steps: Steps
    served: Served


def dry_run(experiment: Experiment, listener: Listener) -> DryRunResult:
    """Run the stages before `train`, two steps of it, and the export of an untrained model.

    Args:
        experiment: What to train. A strategy for several processes is replaced by one process.
        listener: Receives the events.

    Raises:
        UserError: training or serving would fail.
    """
    chain = run_chain(experiment, listener, until="transform")
    began_s = time.monotonic()
    listener.stage_began("dry run")
    import_tensorflow()
    from stoker.app.training.setup import begin_process, open_and_build, resolve_here
    from stoker.train.callbacks.hooks import apply_user_hooks

    alone = experiment.in_one_process()
    if alone is not experiment:
        listener.log(f"The dry run uses this process alone instead of {experiment.train.strategy}.")
    context = chain.context(alone, listener.progress)
    train, transform = alone.train, context.transform()
    resolved = resolve_here(context, transform, find_devices(), None)
    distribution = begin_process(train, resolved)
    dataset, built = open_and_build(context, transform, distribution)
    resolved = apply_user_hooks(resolved, train, model=built.model, callbacks=())
    steps = _two_steps(built, (dataset, transform), train, resolved, distribution)
    served = _serve(built, dataset, transform)
    listener.stage_ended(
        StageOutcome(
            stage="dry run",
            skipped=False,
            why="nothing is recorded",
            took_s=time.monotonic() - began_s,
            output=chain.run,
            result={},
        )
    )
    return DryRunResult(run=str(chain.run), steps=steps, served=served)


def _two_steps(
    built: BuiltModel,
    data: tuple[AnyDataset, AnyTransform],
    train: TrainConfig,
    resolved: ResolvedTraining,
    distribution: Distribution,
) -> Steps:
    import tensorflow as tf

    from stoker.train.health.step_operations import placements, traced_operations
    from stoker.train.model.keras_model import adapt_load
    from stoker.train.optimizer.settings import prepare_optimizer
    from stoker.train.setup.whole_batches import first_share
    from stoker.train.step.custom_train_step import first_pass, make_step
    from stoker.train.step.step import StepSettings
    from stoker.train.watch.footprint import measure_footprint

    feed, elements = _two_elements(*data, train=train, resolved=resolved)
    part = tf.nest.map_structure(lambda tensor: tensor[: resolved.batch_size], elements[0])
    load = adapt_load(feed.load, built.model, class_weight=train.class_weight)
    batch = load(part)
    with distribution.strategy.scope():
        call(first_pass, built, batch, what="a first batch through the model and its loss")
        average = prepare_optimizer(built.model, train, resolved)
    settings = StepSettings(
        batch_size=resolved.batch_size,
        accumulate=resolved.accumulate,
        virtual_workers=resolved.virtual_workers,
        xla=resolved.xla,
        reduction_dtype=train.reduction_dtype,
        reduction_bytes_per_pack=train.reduction_bytes_per_pack,
        average=average,
    )
    step = tf.function(
        make_step(built, load, distribution=distribution, settings=settings),
        reduce_retracing=True,
    )
    results: list[tuple[float, float]] = []

    def first() -> None:
        results.append(_timed(step, first_share(elements[0], distribution)))

    operations = call(traced_operations, first, what="the first step of training")
    results.append(_timed(step, first_share(elements[-1], distribution)))
    model = built.model
    return Steps(
        resolved=resolved,
        footprint=measure_footprint(model, lambda one: _loss_of(built, one), batch),
        placed=placements([*model.variables, *model.optimizer.variables], operations),
        losses=[loss for loss, _ in results],
        first_step_s=results[0][1],
        second_step_s=results[1][1],
        peak_bytes=_peaks(),
    )


def _two_elements(
    dataset: AnyDataset, transform: AnyTransform, *, train: TrainConfig, resolved: ResolvedTraining
) -> tuple[Any, list[Any]]:
    """Return the feed of the training split, and its elements for the first steps."""
    from stoker.data.feed.calls import Calls
    from stoker.data.user_dataset.feed import OwnFeed
    from stoker.train.setup.feeds import open_feeds
    from stoker.train.setup.whole_batches import WholeFeed, whole_steps

    # memory_bytes=0: the feed caches nothing, because only two batches are needed, not an epoch.
    local, _ = open_feeds(
        dataset,
        transform,
        config=train,
        memory_bytes=0,
    )
    feed = whole_steps(local, resolved) if resolved.strategy == "tpu" else local
    size = resolved.global_batch
    rows = feed.steps(size) * size if isinstance(feed, OwnFeed | WholeFeed) else feed.rows
    calls = Calls(
        rows=rows, batch_size=size, steps_per_call=1, seed=train.seed, first=0, last=STEPS
    )
    with feed.shuffled(calls) as batches:
        return feed, list(itertools.islice(batches, STEPS))


def _peaks() -> dict[str, int]:
    import tensorflow as tf

    gpus = [device.name for device in tf.config.list_logical_devices("GPU")]
    memory = tf.config.experimental.get_memory_info
    return {name.rpartition("device:")[2]: memory(name)["peak"] for name in gpus}


def _loss_of(built: BuiltModel, batch: Any) -> Any:
    from stoker.train.step.step import loss_arguments

    outputs = built.model(built.adapt(batch[0]), training=True)
    return built.model.compute_loss(**loss_arguments(batch, outputs), training=True)


def _timed(step: Callable[[Any], Any], element: Any) -> tuple[float, float]:
    began_s = time.monotonic()
    outcome = step(element)
    loss = float(outcome.loss_sum) / float(outcome.rows)
    took_s = time.monotonic() - began_s
    if not bool(outcome.finite) or not math.isfinite(loss):
        also = ", and gradients that are not finite" if math.isfinite(loss) else ""
        raise UserError(
            "the loss and the gradients of the first steps must be finite numbers",
            got=Plain(f"a loss of {loss:g}{also}"),
            fix="Look for NaN in the features (`stoker analyze`), or lower the learning rate.",
        )
    return loss, took_s


def _serve(built: BuiltModel, dataset: AnyDataset, transform: AnyTransform) -> Served:
    from stoker.core.files import list_files
    from stoker.export.saved_model import export_saved_model
    from stoker.export.vetting import vet_model

    columns = transform.serving_columns
    first = next(split_rows(dataset, "eval", columns, batch_rows=1))
    row = {name: values[:1] for name, values in first.items()}
    with tempfile.TemporaryDirectory(prefix="stoker-dry-run-") as scratch:
        folder = Path(scratch) / "model"
        what = "the export of the untrained model"
        call(export_saved_model, built.model, built.adapt, transform, folder, what=what)
        size = sum(path.stat().st_size for path in list_files(folder))
        try:
            vetted = call(vet_model, folder, columns, row, what="calling the exported model")
        except CheckFailed as error:
            raise ConfigError(
                "the exported model must answer a request even before training",
                got=Plain(f"{error.rule.replace(f'{folder}: ', '')}: {error.got}"),
                fix=error.fix,
            ) from error
    return Served(signatures=vetted["signatures"], outputs=vetted["outputs"], size_bytes=size)
