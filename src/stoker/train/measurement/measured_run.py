"""A run for measurements: it writes no checkpoints, does not validate, and has no last step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

from stoker.data.user_dataset.features import AnyTransform
from stoker.data.user_dataset.load_dataset import AnyDataset
from stoker.train.config import ResolvedTraining, TrainConfig
from stoker.train.context.run_context import RunContext, RunSetup
from stoker.train.context.start_position import RunStart, open_run
from stoker.train.loop.run import Run
from stoker.train.setup.build_model import BuiltModel
from stoker.train.setup.strategy import Distribution

Kind = Literal["resident", "called", "real", "input"]
"""What a window measures. resident: the compiled step on a batch in memory. called: calls of training on
such a batch, including their Python code. real: training with real input. input: only the input; batches
are read and dropped."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """The measurements of a window, a short period of training."""

    kind: Kind
    steps: int
    rows: float
    wall_s: float
    wait_s: float
    """Part of `wall_s` that was blocked in `next(iterator)`; all of it in a window of kind `input`."""
    cpu_s: float
    """CPU time of all threads of the process."""

    @property
    def rows_per_s(self) -> float:
        """Samples per second of wall time."""
        return self.rows / self.wall_s


EPOCHS = 1_000_000
"""Number of epochs of a measured run: more than a probe can complete, because it ends after some time."""


@contextmanager
def open_measured_run(
    built: BuiltModel,
    data: tuple[AnyDataset, AnyTransform],
    *,
    config: TrainConfig,
    resolved: ResolvedTraining,
    distribution: Distribution,
    context: RunContext,
) -> Iterator[tuple[Run, RunStart]]:
    """Open the data and compile the step of a run that writes no checkpoints and has no last step.

    Args:
        built: The user's compiled model, built in the strategy's scope.
        data: Dataset with the splits `train` and `eval`, and its transform.
        config: The user's `train` section; its epochs are ignored.
        resolved: The values that replaced each `auto`.
        distribution: The distribution of one process.
        context: All other inputs; nothing is written to its checkpoints.

    Raises:
        UserError: Training with these settings would fail.
    """
    config = replace(config, epochs=EPOCHS, on_oom="stop")
    opened = open_run(*data, config=config, resolved=resolved, context=context)
    setup = RunSetup(
        built=built,
        config=config,
        resolved=_calls_of_an_epoch(resolved, opened),
        distribution=distribution,
        context=context,
    )
    run = Run(setup, opened, None)
    run.measures_ceiling = False
    try:
        run.begin(None)
        run.fitting(run.measure_ceiling)
        yield run, opened
    finally:
        run.close()


def train_for(run: Run, opened: RunStart, *, steps: int) -> None:
    """Train for some steps; the run's writer receives the mean loss of each call.

    Raises:
        UserError: Training failed, e.g. at a step that is not finite.
    """
    with opened.feed.shuffled(run.compiled.calls(run.position)) as batches:
        step_input = run.compiled.step_input(batches)
        while run.position.step < steps:
            run.begin_epoch()
            run.one_call(step_input)
            if not run.position.validated:
                run.skip_validation()


def _calls_of_an_epoch(resolved: ResolvedTraining, opened: RunStart) -> ResolvedTraining:
    """Limit the steps per call to the steps of an epoch."""
    most = max(1, opened.position.per_epoch)
    return replace(resolved, steps_per_call=min(resolved.steps_per_call, most))
