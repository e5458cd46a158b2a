"""The last step of `stoker run`: starts a real server, and calls it over REST and gRPC with rows of the eval split."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.app.chain import ChainResult, StageOutcome
from stoker.app.context import ServeResult
from stoker.app.evaluation import labels_of
from stoker.app.experiment import Experiment
from stoker.app.stage_outputs import open_dataset, open_transform, split_rows
from stoker.client import GrpcClient, RestClient
from stoker.client.rows import json_instances
from stoker.cluster.processes import Child, ProcessOptions, last_line
from stoker.core.errors import CheckFailed, Plain
from stoker.core.files import read_json
from stoker.core.multi_output import ONLY, by_output
from stoker.data.dataset import BATCH_ROWS
from stoker.evaluate.evaluation import read_evaluation
from stoker.registry.repository import version_folders

SENT_ROWS = 5
"""Number of rows of the eval split that are sent to the server."""

START_TIMEOUT_S = 120.0
"""Maximum time until the server is ready, seconds; it imports TensorFlow and may load a large model."""

STOP_TIMEOUT_S = 30.0
"""Maximum time for the server to finish its requests and exit, seconds."""

MAX_DIFFERENCE = 1e-6
"""Maximum difference between the answers over REST and over gRPC."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The true label of a row, and the server's answers for it."""

    truth: str
    rest: str
    grpc: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SmokeTest:
    """Answers of the served model."""

    version: int
    """The version that answered over gRPC."""

    answers: tuple[Answer, ...]

    rest_row: dict[str, Any]
    """The first row as a JSON instance, for a command to try."""

    outcome: StageOutcome
    """The smoke test as a stage, for the summary."""


def smoke_test(experiment: Experiment, chain: ChainResult) -> SmokeTest:
    """Serve the model that a run pushed, call it over both protocols, compare the answers, and stop the server.

    Raises:
        CheckFailed: the server did not start, returned an error, answered differently over the two
            protocols, or served another version.
    """
    began_s, model = time.monotonic(), experiment.model_name
    transform = open_transform(experiment, chain.output("transform"))
    dataset = open_dataset(experiment, chain.output("ingest"), analysis=chain.results["analyze"])
    version = chain.results["push"]["version"]
    columns = transform.serving_columns
    some = next(split_rows(dataset, "eval", transform.columns, batch_rows=BATCH_ROWS))
    count = len(next(iter(some.values())))
    sample = np.linspace(0, count - 1, min(SENT_ROWS, count)).astype(int)
    rows = {name: values[sample] for name, values in some.items()}
    inputs = {column.name: rows[column.name] for column in columns}
    instances = json_instances(inputs, binary=[c.name for c in columns if c.dtype == "image"])
    with (
        only_version(experiment.models_root / model, version) as base,
        running_server(base, model) as (rest_port, grpc_port),
    ):
        with RestClient(f"http://127.0.0.1:{rest_port}") as client:
            rest = dict(client.predict(model, instances).outputs)
        with GrpcClient(f"127.0.0.1:{grpc_port}") as client:
            answers = client.predict(model, inputs)
    grpc, served = _named_as(rest, answers.outputs), answers.version or 0
    _check(rest, grpc, served, version)
    evaluated = read_evaluation(chain.output("evaluate") / "evaluation.json").outputs
    classes = {
        output: label.classes if evaluated[output].task.kind in ("binary", "multiclass") else ()
        for output, label in transform.labels.items()
    }
    is_logit = by_output(chain.results["export"]["from_logits"])
    # A single logit is shown as a number, because it is not the probability of the second class.
    answered_as = {
        output: None if is_logit.get(output) and names and len(names) == 2 else names
        for output, names in classes.items()
    }
    return SmokeTest(
        version=served,
        answers=tuple(
            Answer(truth=t, rest=r, grpc=g)
            for t, r, g in zip(
                _by_row(labels_of(transform, rows), classes, _label_texts),
                _by_row(rest, answered_as, _answer_texts),
                _by_row(grpc, answered_as, _answer_texts),
                strict=True,
            )
        ),
        rest_row=instances[0],
        outcome=StageOutcome(
            stage="serve",
            skipped=False,
            why="",
            took_s=time.monotonic() - began_s,
            output=experiment.models_root / model,
            result=ServeResult(version=served, rows=len(sample)),
        ),
    )


def _named_as(rest: Answers, grpc: Mapping[str, NDArray[Any]]) -> Answers:
    """Return gRPC's answers under REST's names: REST does not name the only output."""
    if ONLY in rest:
        return {ONLY: next(iter(grpc.values()))}
    return {name: grpc[name] for name in rest}


@contextlib.contextmanager
def only_version(base: Path, version: int) -> Iterator[Path]:
    """Yield a temporary repository with one version of a model and without a rollout state, which would route the traffic."""
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / str(version)).symlink_to(
            version_folders(base)[version].resolve(), target_is_directory=True
        )
        yield Path(scratch)


@contextlib.contextmanager
def running_server(base: Path, model: str) -> Iterator[tuple[int, int]]:
    """Run `stoker serve` in a child process until the block ends; yield its REST and gRPC ports."""
    with tempfile.TemporaryDirectory() as scratch:
        ready, log = Path(scratch) / "ready.json", Path(scratch) / "log"
        command = [sys.executable, "-m", "stoker", "serve"]
        command += ["--model_name", model, "--model_base_path", str(base)]
        command += ["--rest_api_port", "0", "--port", "0", "--ready-file", str(ready)]
        # The server exits when its standard input is closed, which happens however this process ends.
        server = Child(
            "the server",
            [*command, "--stop-with-stdin"],
            ProcessOptions(stdin=subprocess.PIPE, output=log, parent_death=None, ready_file=ready),
        )
        try:
            if not server.wait_until_ready(START_TIMEOUT_S):
                raise CheckFailed(
                    f"the server must be ready within {START_TIMEOUT_S:.0f} s",
                    got=Plain(last_line(log) or "no output"),
                )
            ports: dict[str, int] = read_json(ready)
            yield ports["rest_port"], ports["grpc_port"]
        finally:
            server.close_input()
            server.end(STOP_TIMEOUT_S)


Answers = dict[str, NDArray[Any]]
"""Output -> [rows, ...]."""


def _check(rest: Answers, grpc: Answers, served: int, version: int) -> None:
    if served != version:
        raise CheckFailed(
            f"expected version {version} to be served", got=Plain(f"version {served}")
        )
    for output, one in rest.items():
        other = grpc[output]
        if one.shape != other.shape or not np.allclose(one, other, MAX_DIFFERENCE, MAX_DIFFERENCE):
            raise CheckFailed(
                "REST and gRPC must give the same answers",
                got=Plain(f"{one.tolist()} and {other.tolist()}"),
            )


Classes = Sequence[str] | None
"""Names of the classes, by id. None if the classes have no names; empty if the output has no classes."""

_SHOWN_VALUES = 8
"""Maximum number of values that are shown of an output without classes."""


def _by_row(
    values: Answers,
    classes: Mapping[str, Classes],
    shown: Callable[[NDArray[Any], Classes], list[str]],
) -> list[str]:
    """Return one string per row, with the names of the outputs if there are several."""
    columns = [
        [f"{output} {text}" if output else text for text in shown(values[output], of_classes)]
        for output, of_classes in classes.items()
    ]
    return [", ".join(row) for row in zip(*columns, strict=True)]


def _label_texts(labels: NDArray[Any], classes: Classes) -> list[str]:
    flat = labels.reshape(len(labels), -1)
    if classes is not None and not classes:
        return _values(flat)
    if classes:
        return [classes[int(row[0])] for row in flat]
    # A one-hot label: find its class.
    return [f"{float(row[0] if len(row) == 1 else row.argmax()):g}" for row in flat]


def _answer_texts(answers: NDArray[Any], classes: Classes) -> list[str]:
    flat = answers.reshape(len(answers), -1)
    if flat.shape[1] == 1 and classes and len(classes) == 2 and np.all((flat >= 0) & (flat <= 1)):
        # A single output is the probability of the second class. Add that of the first class, so that the output is
        # shown in the same way as one with a probability per class.
        flat = np.concatenate([1 - flat, flat], axis=1)
    if flat.shape[1] == 1:
        return [f"{row[0]:.4g}" for row in flat]
    if classes is not None and not classes:
        return _values(flat)
    best = flat.argmax(axis=1)
    return [
        f"{classes[index] if classes else index} ({row[index]:.3f})"
        for index, row in zip(best, flat, strict=True)
    ]


def _values(rows: NDArray[Any]) -> list[str]:
    more = " ..." if rows.shape[1] > _SHOWN_VALUES else ""
    return [" ".join(f"{value:.4g}" for value in row[:_SHOWN_VALUES]) + more for row in rows]
