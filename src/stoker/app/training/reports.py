"""Reports of the stage `train` while it runs: metrics, TensorBoard, progress line, wall time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from stoker.app.context import Context
from stoker.app.training.folder import METRICS, TENSORBOARD, WALL_TIME
from stoker.telemetry.run_time import RunTime
from stoker.telemetry.writers import Everywhere
from stoker.telemetry.writers.append_only import JsonLines
from stoker.telemetry.writers.tensorboard import TensorBoard
from stoker.train.context.run_context import Progress
from stoker.train.watch.device_watch import DeviceWatch
from stoker.train.watch.labels import vocabulary_terms
from stoker.train.watch.progress_line import ProgressLine
from stoker.train.watch.watch import NoWatch, RunWatch


def run_time(context: Context, folder: Path, *, is_chief: bool) -> RunTime:
    """The account of the run's wall time; with several workers, that of the first one."""
    return RunTime(context.wall, folder / WALL_TIME if is_chief else None)


@contextmanager
def writing(folder: Path, *, is_chief: bool) -> Iterator[tuple[Everywhere, TensorBoard | None]]:
    """The writers of metrics: with several workers, only the first one writes."""
    board = TensorBoard(folder / TENSORBOARD) if is_chief else None
    writer = Everywhere([] if board is None else [JsonLines(folder / METRICS), board])
    try:
        yield writer, board
    finally:
        writer.close()


def progress_reporter(context: Context) -> Callable[[Progress], None]:
    """What shows a person where training stands."""
    settings = context.experiment.train

    @functools.cache
    def line(steps: int) -> ProgressLine:
        return ProgressLine(steps=steps, epochs=settings.epochs, monitor=settings.monitor)

    def report_progress(progress: Progress) -> None:
        text = line(progress.steps)(
            step=progress.step, epoch=progress.epoch, scalars=progress.scalars
        )
        context.progress(text, progress.step / progress.steps)

    return report_progress


def watched(
    board: TensorBoard | None,
    context: Context,
    folder: Path,
    *,
    alone: bool,
    device: DeviceWatch,
) -> RunWatch | NoWatch:
    """TensorBoard with the run's settings in it, if this process writes it."""
    if board is None:
        return NoWatch()
    experiment, transform = context.experiment, context.transform()
    board.settings(experiment.to_json(), run=context.run_id)
    config = experiment.train.tensorboard
    terms = {
        layer: vocabulary_terms(transform, vocabulary) if vocabulary is not None else None
        for layer, vocabulary in config.embeddings.items()
    }
    return RunWatch(board, config=config, terms=terms, folder=folder, alone=alone, device=device)
