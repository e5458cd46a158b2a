"""One folder for TensorBoard: `tensorboard --logdir FOLDER` shows it while training goes on.

train/       loss and speed at each interval, `epoch_*` after each epoch, histograms, the graph
validation/  `epoch_*` of the eval split: the same names, so that both are lines of one chart
(itself)     settings and results (HParams, text), embeddings (projector), profiles
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary

from stoker.telemetry import catalogue
from stoker.telemetry.writers.appended import Tolerated
from stoker.telemetry.writers.behind import Behind
from stoker.telemetry.writers.events import EventFile
from stoker.telemetry.writers.projector import Embedding, write_projector
from stoker.telemetry.writers.summaries import (
    Histogram,
    histogram_value,
    session_end,
    session_start,
    text_value,
)

_VALIDATION = "val_"
_EPOCH = "epoch_"


class TensorBoard:
    """Writes event files in a background thread: training does not wait for them.

    A killed process loses the events that wait; those that were written are complete.
    """

    def __init__(self, folder: Path) -> None:
        """Open the three files.

        Raises:
            UserError: they cannot be made.
        """
        self.folder = folder
        self._run = EventFile(folder)
        self._train = EventFile(folder / "train")
        self._validation = EventFile(folder / "validation")
        self._behind = Behind("tensorboard")
        self._projector = Tolerated(f"{folder}: the projector's embeddings")

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Add the scalars of an interval, or (they hold `epoch`) those at an epoch's end."""
        kept = dict(scalars)
        self._behind.do(lambda: self._write(step, kept))

    def _write(self, step: int, scalars: Mapping[str, float]) -> None:
        if catalogue.EPOCH.name not in scalars:
            self._train.add(_scalars(step, scalars))
            return
        # Keras's own names, so that its users find them.
        training = {
            name if name == catalogue.EPOCH.name else _EPOCH + name: value
            for name, value in scalars.items()
            if not name.startswith(_VALIDATION)
        }
        validation = {
            _EPOCH + name.removeprefix(_VALIDATION): value
            for name, value in scalars.items()
            if name.startswith(_VALIDATION)
        }
        self._train.add(_scalars(step, training))
        self._validation.add(_scalars(step, validation))

    def rewind(self, step: int, *, validated: bool = True) -> None:
        """Let TensorBoard drop what a run that was killed wrote for later steps.

        It drops whole steps: to forget the metrics at an epoch's end is to forget the last call's.
        """
        for file in self._files:
            self._behind.do(partial(file.rewind, step if validated else step - 1))

    def histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Add histograms by tag, e.g. `weights/dense/kernel`."""
        kept = dict(histograms)

        def write() -> None:
            values = [histogram_value(tag, histogram) for tag, histogram in kept.items()]
            self._train.add(Event(step=step, summary=Summary(value=values)))

        self._behind.do(write)

    def graph(self, graph_def: Callable[[], bytes]) -> None:
        """Add the graph of a step.

        Args:
            graph_def: Makes the serialized GraphDef, in the writer's thread.
        """
        self._behind.do(lambda: self._train.add(Event(graph_def=graph_def())))

    def embeddings(self, embeddings: Sequence[Embedding]) -> None:
        """Show these vectors in the projector, in place of those of before."""

        def write() -> None:
            with self._projector:
                write_projector(self.folder, embeddings)

        self._behind.do(write)

    def settings(self, settings: Mapping[str, Any], *, run: str) -> None:
        """Add a run's settings: a row of the HParams table, and a text to read.

        Args:
            settings: Nested settings.
            run: The run's id.
        """
        text = json.dumps(settings, indent=2, default=str)
        started = session_start(settings, run=run)
        value = text_value("settings", f"```json\n{text}\n```")
        self._behind.do(lambda: self._run.add(Event(summary=started)))
        self._behind.do(lambda: self._run.add(Event(summary=Summary(value=[value]))))

    def results(self, step: int, metrics: Mapping[str, float], *, succeeded: bool) -> None:
        """Add what the run ends with: metrics that the HParams table shows, and how it ended."""
        best = {f"best/{name}": value for name, value in metrics.items()}
        ended = Event(step=step, summary=Summary(value=[session_end(succeeded=succeeded)]))
        self._behind.do(lambda: self._run.add(_scalars(step, best)))
        self._behind.do(lambda: self._run.add(ended))

    def wait(self) -> None:
        """Return when all events so far have been handed to the operating system."""
        self._behind.wait()

    def close(self) -> None:
        """Write waiting events, flush, and close the files."""
        try:
            self._behind.close()
        finally:
            for file in self._files:
                file.close()

    @property
    def _files(self) -> tuple[EventFile, ...]:
        return (self._run, self._train, self._validation)


def _scalars(step: int, scalars: Mapping[str, float]) -> Event:
    values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
    return Event(step=step, summary=Summary(value=values))
