"""What two workers and a parameter server count, compared with the loop of TensorFlow's guide.

python benchmarks/bench_train_ps.py

Counts and bytes only, which do not depend on the machine's speed. All processes are on this one.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf
from keras import layers

from stoker.cluster.resolver import ClusterSpec, held_ports, local_cluster
from stoker.train.parameter_server.calls import Pass, WorkerCalls
from stoker.train.parameter_server.cluster import ClusterConnection, connect
from stoker.train.parameter_server.worker import WorkerModel, open_inbox
from stoker.train.setup.build_model import BuiltModel

RESULTS = Path(__file__).resolve().parent / "results" / "train-ps.json"
SERVE = """
import os
from stoker.cluster.resolver import read_tf_config
from stoker.train.parameter_server.cluster import serve_parameter_role
serve_parameter_role(read_tf_config(os.environ))
"""
UPDATES = 1000
KILLS = 5
LR = 2.0**-10
"""A power of two: a weight whose gradient is 1 is exact after any number of updates below 2**24."""

EMBEDDING = (200_000, 64)
"""Rows and columns of a table of 51 MB."""

HOW = "2 workers, 1 server, 1 chief, as processes on one machine"
Figure = dict[str, Any]


class Roles:
    """The workers and the server."""

    def __init__(self, cluster: tuple[ClusterSpec, ...]) -> None:
        """Start them."""
        self._specs = {spec.name: spec for spec in cluster if spec.job != "chief"}
        self._running = {name: self._started(name) for name in self._specs}

    def kill_and_start(self, name: str) -> None:
        """Kill -9, and the same process again."""
        self._running[name].kill()
        self._running[name].wait()
        self._running[name] = self._started(name)

    def end(self) -> None:
        """Kill them all."""
        for process in self._running.values():
            process.kill()
            process.wait()

    def _started(self, name: str) -> subprocess.Popen[bytes]:
        environ = os.environ | {
            "TF_CONFIG": self._specs[name].to_tf_config(),
            "CUDA_VISIBLE_DEVICES": "-1",
            "TF_CPP_MIN_LOG_LEVEL": "3",
        }
        return subprocess.Popen([sys.executable, "-c", SERVE], env=environ)


def one_weight() -> keras.Model:
    """A weight whose gradient is 1 at every step, and a metric."""
    column = keras.Input((1,))
    weight = layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = keras.Model(column, weight(column))
    model.compile(
        optimizer=keras.optimizers.SGD(LR),
        loss=lambda _, answer: keras.ops.mean(answer, axis=-1),
        metrics=[keras.metrics.MeanAbsoluteError(name="mae")],
    )
    return model


def embedded() -> keras.Model:
    """A large table of which a batch needs 32 rows."""
    ids = keras.Input((), dtype="int32")
    model = keras.Model(
        ids, layers.Dense(1, activation="sigmoid")(layers.Embedding(*EMBEDDING)(ids))
    )
    model.compile(optimizer=keras.optimizers.SGD(0.1), loss="binary_crossentropy")
    return model


def prepared(model: keras.Model, batch: tuple[tf.Tensor, tf.Tensor]) -> BuiltModel:
    """The optimizer and the metrics built."""
    features, labels = batch
    outputs = model(features)
    model.compute_loss(x=features, y=labels, y_pred=outputs)
    model.compute_metrics(x=features, y=labels, y_pred=outputs)
    model.reset_metrics()
    model.optimizer.build(model.trainable_variables)
    return BuiltModel(model=model, adapt=lambda features: features)


def ours(
    connection: ClusterConnection,
    built: BuiltModel,
    batch: Any,
    elements: Iterator[Any],
    *,
    steps: int,
) -> dict[str, float]:
    """Train on some elements; what the server counted."""
    worker = WorkerModel(built, seeds=[])
    with connection.strategy.scope():
        inbox, send = open_inbox(worker, worker.train, lambda e: e, batch, batches=steps)
    *_, taken = Pass(WorkerCalls(connection, silent_s=60.0), inbox, send).run(0, elements)
    counts = [v for v in built.model.metrics_variables if v.path.endswith("count")]
    return {
        "applied": taken.batches,
        "repeated": taken.repeated,
        "iterations": int(built.model.optimizer.iterations.numpy()),
        "metric": max(float(v.numpy()) for v in counts) if counts else 0.0,
        "weight": float(built.model.trainable_variables[0].numpy().ravel()[0]),
    }


def guide(connection: ClusterConnection, model: keras.Model, batch: Any) -> dict[str, float]:
    """The custom loop of TensorFlow's guide: every worker writes the variables.

    Source: tensorflow.org/tutorials/distribute/parameter_server_training, "Training loop".
    """
    features, labels = batch

    @tf.function
    def step() -> None:
        def replica() -> None:
            with tf.GradientTape() as tape:
                outputs = model(features, training=True)
                loss = model.compute_loss(x=features, y=labels, y_pred=outputs)
            model.optimizer.apply(
                tape.gradient(loss, [v.value for v in model.trainable_variables]),
                model.trainable_variables,
            )
            model.compute_metrics(x=features, y=labels, y_pred=outputs)

        connection.strategy.run(replica)

    for _ in range(UPDATES):
        connection.coordinator.schedule(step)
    connection.coordinator.join()
    counts = [v for v in model.metrics_variables if v.path.endswith("count")]
    return {
        "iterations": int(model.optimizer.iterations.numpy()),
        "metric": max(float(v.numpy()) for v in counts),
    }


def killing(roles: Roles, batch: Any) -> Iterator[Any]:
    """The same batch again and again; now and then a worker is killed before the next one."""
    between = UPDATES // (KILLS + 1)
    for number in range(UPDATES):
        kill, rest = divmod(number, between)
        if kill and not rest:
            roles.kill_and_start(f"worker {kill % 2}")
        yield batch


def loopback_bytes() -> int:
    """Bytes that came in on the loopback device since the machine started."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.split()[0] == "lo:")


def sent_by_embedding(connection: ClusterConnection, *, plain: bool) -> float:
    """MB a step that travel between the processes."""
    batch = (tf.range(32), tf.ones([32], tf.int64))
    with connection.strategy.scope():
        built = prepared(embedded(), batch)
    worker = WorkerModel(built, seeds=[])
    if plain:
        for variable in built.model.trainable_variables:
            del variable.sparse_read
    with connection.strategy.scope():
        inbox, send = open_inbox(worker, worker.train, lambda e: e, batch, batches=20)
    both = Pass(WorkerCalls(connection, silent_s=60.0), inbox, send)
    list(both.run(0, [batch] * 20))
    before = loopback_bytes()
    list(both.run(20, [batch] * 20))
    return (loopback_bytes() - before) / 20 / 1e6


def figure(name: str, value: float, *, target: float | None = None, **rest: Any) -> Figure:
    """One row."""
    shown = {"name": name, "value": value, "unit": "", "target": target, "holds": None, "peer": ""}
    return shown | {"how": HOW} | rest


def figures(connection: ClusterConnection, roles: Roles) -> list[Figure]:
    """All rows."""
    batch = (tf.ones([1, 1]), tf.ones([1, 1]))
    with connection.strategy.scope():
        models = [prepared(one_weight(), batch) for _ in range(3)]
    calm = ours(connection, models[0], batch, iter([batch] * UPDATES), steps=UPDATES)
    theirs = guide(connection, models[1].model, batch)
    killed = ours(connection, models[2], batch, killing(roles, batch), steps=UPDATES)
    exact = -UPDATES * LR
    peer = f"Keras in TensorFlow's guide: {theirs['iterations']}"
    sparse, dense = (sent_by_embedding(connection, plain=plain) for plain in (False, True))
    return [
        figure(
            f"updates counted of {UPDATES:,}, optimizer.iterations",
            calm["iterations"],
            target=UPDATES,
            holds=calm["iterations"] == calm["applied"] == UPDATES and calm["weight"] == exact,
            peer=peer,
        ),
        figure(
            f"batches counted of {UPDATES:,} by a metric",
            calm["metric"],
            target=UPDATES,
            holds=calm["metric"] == UPDATES,
            peer=f"Keras in TensorFlow's guide: {theirs['metric']:g}",
        ),
        figure(
            f"updates counted of {UPDATES:,} while workers are killed {KILLS} times by kill -9",
            killed["iterations"],
            target=UPDATES,
            holds=killed["iterations"] == killed["applied"] == UPDATES
            and killed["weight"] == exact,
            how=f"{HOW}; {killed['repeated']:g} came twice and were thrown away",
        ),
        figure(
            "sent a step of an Embedding of 51 MB, 32 rows a batch",
            round(sparse, 3),
            unit="MB",
            target=1.0,
            holds=sparse <= 1.0,
            peer=f"Keras's own read of the variable: {dense:.1f} MB",
            how=f"{HOW}; bytes on the loopback device",
        ),
    ]


def main() -> None:
    """Count and write."""
    logging.getLogger("tensorflow").setLevel(logging.CRITICAL)
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    with held_ports(4) as ports:
        cluster = local_cluster(ports, workers=2, servers=1)
        roles = Roles(cluster)
        connection = connect(cluster[0])
    try:
        found = figures(connection, roles)
    finally:
        roles.end()
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    for row in found:
        sys.stdout.write(f"{row['name']}: {row['value']} {row['unit']} ({row['peer']})\n")
    sys.stdout.flush()
    # TensorFlow's own end waits for servers that are gone.
    os._exit(0)


if __name__ == "__main__":
    main()
