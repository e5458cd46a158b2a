"""Whose fault a step is that fails, and what of the feed several workers cannot share."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import tensorflow as tf

from stoker.app.context import CHECKPOINTS
from stoker.app.experiment import load_experiment
from stoker.app.training.setup import resolve_once, service_of
from stoker.app.training.step_errors import steps_are_the_users
from stoker.core.errors import ConfigError, UserError
from stoker.train.config import ResolvedTraining, TrainConfig

RESOLVED = ResolvedTraining(
    batch_size=16,
    accumulate=1,
    replicas=1,
    workers=1,
    steps_per_call=4,
    precision="float32",
    xla=False,
    strategy="one_device",
    lr_factor=1.0,
    why={"strategy": "no GPU"},
)


def fail(kind: type[tf.errors.OpError], message: str, *, workers: int) -> None:
    with steps_are_the_users(workers=workers):
        raise kind(None, None, message)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (tf.errors.UnavailableError, "Connection reset by peer"),
        (tf.errors.AbortedError, "Collective ops is aborted by: the peer was restarted"),
        (tf.errors.CancelledError, "RPC cancelled"),
        (tf.errors.InternalError, "Collective ops is aborted by: worker 1 is gone"),
    ],
)
def test_a_lost_peer_is_not_a_user_error_and_is_raised(
    kind: type[tf.errors.OpError], message: str
) -> None:
    with pytest.raises(kind):
        fail(kind, message, workers=2)
    with pytest.raises(ConfigError, match="a training step failed"):
        fail(kind, message, workers=1)


@pytest.mark.parametrize(
    ("said", "advised"),
    [
        ("indices[3] = 9 is not in [0, 4)", True),
        ("RuntimeError: mine broke\nTraceback (most recent call last):\n  File", False),
    ],
)
def test_an_id_is_suspected_only_where_no_function_says_what_is_wrong(
    said: str, *, advised: bool
) -> None:
    with pytest.raises(ConfigError) as refused:
        fail(tf.errors.InvalidArgumentError, said, workers=1)

    assert said.partition("\n")[0] in refused.value.line()
    assert ("outside its Embedding" in refused.value.line()) == advised


def test_a_wrong_id_is_the_users_on_the_worker_that_has_it_and_on_its_peers() -> None:
    for message in ("indices[3] = 9", "Collective ops is aborted by: indices[3] = 9"):
        with pytest.raises(ConfigError, match=r"indices\[3\] = 9"):
            fail(tf.errors.InvalidArgumentError, message, workers=2)


def test_a_data_service_is_refused_to_several_workers_that_reduce(tmp_path: Path) -> None:
    (tmp_path / "stoker.yaml").write_text(
        "name: t\ndata: {source: d.csv, service: {address: '127.0.0.1:1'}}\nmodel: model:build\nlabel: y\n"
    )
    experiment = load_experiment(tmp_path)

    with pytest.raises(ConfigError, match=r"multi_worker needs the local feed"):
        service_of(experiment, replace(RESOLVED, strategy="multi_worker", workers=2, replicas=2))
    for strategy in ("one_device", "parameter_server"):
        assert service_of(experiment, replace(RESOLVED, strategy=strategy)) is not None


@pytest.mark.parametrize("began", ["one_device", "parameter_server"])
def test_a_continued_run_keeps_its_parameter_servers(tmp_path: Path, began: str) -> None:
    before = replace(RESOLVED, strategy=began)  # type: ignore[arg-type]  # a string of a Literal
    other = {"one_device": "parameter_server", "parameter_server": "one_device"}[began]
    resolve_once(tmp_path, TrainConfig(), before)
    (tmp_path / CHECKPOINTS / "step-0000000003").mkdir(parents=True)

    with pytest.raises(
        UserError, match="must continue with parameter servers if and only if it started"
    ):
        resolve_once(tmp_path, TrainConfig(), replace(RESOLVED, strategy=other))  # type: ignore[arg-type]  # a string of a Literal
