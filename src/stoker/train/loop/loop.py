"""Runs a training from start to end."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext

from stoker.data.user_dataset.features import AnyTransform
from stoker.data.user_dataset.feed import OwnFeed
from stoker.data.user_dataset.load_dataset import AnyDataset
from stoker.telemetry.catalogue import training as catalogue
from stoker.train.checkpoints.writer import CheckpointWriter
from stoker.train.config import ResolvedTraining, TrainConfig
from stoker.train.context.monitor import resolve_monitor_mode
from stoker.train.context.run_context import RunContext, RunSetup, TrainResult
from stoker.train.context.start_position import RunStart, TrainFeed, checkpoint_writer, open_run
from stoker.train.context.utilization import BusyReport
from stoker.train.loop.run import EVAL_BATCHES, Run
from stoker.train.loop.validation import EvalBatches
from stoker.train.setup.build_model import BuiltModel
from stoker.train.setup.strategy import Distribution


def fit(
    built: BuiltModel,
    data: tuple[AnyDataset, AnyTransform],
    *,
    config: TrainConfig,
    resolved: ResolvedTraining,
    distribution: Distribution,
    context: RunContext,
) -> TrainResult:
    """Train from the start or a checkpoint, validate after each epoch, and keep the best and the last state.

    Args:
        built: The user's compiled model, built in the strategy's scope.
        data: Dataset with the splits `train` and `eval`, and the transform that turns its raw
            columns into features and label.
        config: The user's `train` section.
        resolved: The values that replaced each `auto`.
        distribution: Devices and workers that share a step.
        context: All other inputs.

    Raises:
        UserError: A loss or a gradient is not finite (the error names the step), the monitored
            metric does not exist, or all checkpoints are damaged.
        Preempted: The process got a signal to stop; everything is saved.
    """
    setup = RunSetup(
        built=built,
        config=resolve_monitor_mode(config, data[1].labels),
        resolved=resolved,
        distribution=distribution,
        context=context,
    )
    wall = context.run_time.wall
    # 1. Open the data, and restore the position of an earlier process.
    with wall.within("data"):
        opened = open_run(*data, config=setup.config, resolved=resolved, context=context)
    held_out = opened.held_out
    with (
        wall.within("data"),
        held_out.in_order(batch_size=EVAL_BATCHES * resolved.batch_size) as in_order,
        _checkpoints(setup, opened) as writer,
        ExitStack() as at_end,
    ):
        # 2. Create everything that a step changes, so that it can be restored.
        with wall.within("build"):
            run = Run(setup, opened, writer)
        at_end.callback(run.close)
        eval_batches = EvalBatches(in_order, begins_early=not isinstance(held_out, OwnFeed))
        wall.enter("between")
        run.begin(opened.found)

        # 3. Train epochs; an epoch consists of calls, and a call of steps. A call ends at a step from which
        #    a checkpoint could resume. In the first epoch, T_ceil is measured between calls.
        _run_epochs(run, opened.feed, eval_batches)
        run.end(eval_batches)
        wall.enter("ending")

        # 4. Report how busy the device was.
        return _result(run, run.ceiling_step_s())


def _checkpoints(
    setup: RunSetup, opened: RunStart
) -> AbstractContextManager[CheckpointWriter | None]:
    """Return the writer of the checkpoints; None for workers other than the chief."""
    if not setup.distribution.is_chief:
        return nullcontext()
    return checkpoint_writer(opened.found, config=setup.config, context=setup.context)


def _run_epochs(run: Run, feed: TrainFeed, eval_batches: EvalBatches) -> None:
    position, wall = run.position, run.context.run_time.wall
    while not position.over:
        with feed.shuffled(run.compiled.calls(position)) as batches:
            with wall.within("data"):
                step_input = run.compiled.step_input(batches)
            moved = False
            while not position.over and not moved:
                run.begin_epoch()
                if position.validated:
                    if run.ends_epoch():
                        eval_batches.begin()
                    moved = run.one_call(step_input)
                if not position.validated:
                    run.end_epoch(eval_batches)
                moved = position.skip() or moved
    if not position.validated:
        run.end_epoch(eval_batches)


def _result(run: Run, ceiling_s: float) -> TrainResult:
    position, timing = run.position, run.position.timing
    busy = BusyReport(
        ceiling_step_s=ceiling_s,
        ceiling_rows=run.compiled.source.rows_per_step,
        real_step_s=timing.wall_s / timing.steps,
        real_rows=timing.rows / timing.steps,
        input_wait=min(1.0, timing.wait_s / timing.wall_s),
    )
    run.context.run_time.settle(busy.real_step_s, waiting=busy.input_wait)
    last = {catalogue.BUSY_FRACTION.tensorboard: busy.busy_fraction}
    if (goodput := run.context.run_time.goodput) is not None:
        last[catalogue.GOODPUT.tensorboard] = goodput
    run.context.writer.write(position.step, last)
    return TrainResult(
        steps=position.step,
        epochs=-(-position.step // position.per_epoch),
        best_epoch=position.best_epoch,
        metrics=position.best_metrics,
        busy=busy,
        samples_per_s=timing.rows / timing.wall_s,
        resolved=run.resolved,
        health=run.health(),
        xla=run.xla(),
        agreement=run.agreement,
    )
