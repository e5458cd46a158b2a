"""The chief of two workers and a parameter server, and the one who starts and kills them.

Usage: parameter_server_scenarios.py DATASET TRANSFORM OUT SCENARIO...; OUT gets a folder and a JSON each.
All of them run on one cluster, in one process: TensorFlow takes seconds to start.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from stoker.cluster.resolver import ClusterSpec, held_ports, local_cluster
from stoker.core.errors import UserError
from stoker.data.dataset import load_dataset
from stoker.data.features.preprocessing.transform import load_transform
from stoker.telemetry.writers import Everywhere
from stoker.telemetry.writers.append_only import JsonLines
from stoker.train.checkpoints.store import newest_good
from stoker.train.config import ResolvedTraining, TrainConfig
from stoker.train.context.heartbeat import process_heartbeat
from stoker.train.context.preemption import Preemption
from stoker.train.context.run_context import Progress, RunContext
from stoker.train.parameter_server.cluster import ClusterConnection, connect
from stoker.train.parameter_server.loop import fit_parameter_server
from stoker.train.parameter_server.worker import WorkerModel, open_inbox
from stoker.train.setup.build_model import BuiltModel, build_model, prepare_process

SERVE = """
import os
from stoker.app.import_tensorflow import import_tensorflow
import_tensorflow()
from stoker.cluster.resolver import read_tf_config
from stoker.train.parameter_server.cluster import serve_parameter_role
serve_parameter_role(read_tf_config(os.environ))
"""
LR = 2.0**-10
PER_EPOCH = 210
ROWS_A_STEP = 3
"""Of the scenarios of `make test`, whose epochs have 70 steps."""

RECOVERY_S = 600.0
"""Longest that TensorFlow may take to see that a worker is back."""

SILENCE_S = 600.0
"""Longest that a stopped worker waits to be spoken of."""


class Roles:
    """The processes other than the chief."""

    def __init__(self, cluster: tuple[ClusterSpec, ...]) -> None:
        self._specs = {spec.name: spec for spec in cluster if spec.job != "chief"}
        self._running = {name: self._started(name) for name in self._specs}

    def kill(self, name: str) -> None:
        self._running[name].kill()
        self._running[name].wait()

    def send(self, name: str, number: signal.Signals) -> None:
        self._running[name].send_signal(number)

    def start_again(self, name: str) -> None:
        self._running[name] = self._started(name)

    def wait_for(self, name: str) -> None:
        """Wait until it listens."""
        host, _, port = self._specs[name].address.rpartition(":")
        end_s = time.monotonic() + RECOVERY_S
        while True:
            try:
                socket.create_connection((host, int(port)), timeout=1.0).close()
            except OSError:
                if time.monotonic() > end_s:
                    raise
                time.sleep(0.1)  # a process that imports TensorFlow says nothing meanwhile
            else:
                return

    def end(self) -> None:
        for name in self._running:
            self.kill(name)

    def _started(self, name: str) -> subprocess.Popen[bytes]:
        environ = os.environ | {
            "TF_CONFIG": self._specs[name].to_tf_config(),
            "CUDA_VISIBLE_DEVICES": "-1",
            "TF_CPP_MIN_LOG_LEVEL": "3",
        }
        return subprocess.Popen([sys.executable, "-c", SERVE], env=environ)


def constant(features: dict[str, Any]) -> keras.Model:
    """One weight, whose gradient is 1 at every step, and a moving average of twos."""
    return weighed(features, keras.optimizers.SGD(LR))


def momentum(features: dict[str, Any]) -> keras.Model:
    """The same under an optimizer that reads its state and writes it back."""
    return weighed(features, keras.optimizers.SGD(LR, momentum=0.5))


def diverging(features: dict[str, Any]) -> keras.Model:
    """Infinite after some steps, of which each takes a while: others are under way by then."""
    return weighed(features, keras.optimizers.SGD(1e37), before=Slow())


class Slow(layers.Layer):  # type: ignore[misc]  # Keras has no types
    """Passes on what it is given, some 0.1 s later."""

    def call(self, inputs: Any) -> Any:
        matrix = tf.eye(400) + tf.reduce_mean(tf.stop_gradient(inputs))
        return inputs + 0 * tf.reduce_max(tf.linalg.eigvalsh(matrix))


def weighed(
    features: dict[str, Any],
    optimizer: keras.Optimizer,
    before: Callable[[Any], Any] = lambda ones: ones,
) -> keras.Model:
    ones = before(keras.ops.ones_like(keras.ops.expand_dims(features["a"], -1)))
    weight = layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    normed = layers.BatchNormalization(momentum=0.999, scale=False, center=False)(2 * ones)
    model = keras.Model(features, weight(ones) + 0 * normed)
    model.compile(
        optimizer=optimizer,
        loss=lambda y, answer: keras.ops.mean(answer, axis=-1),
        metrics=["accuracy"],
    )
    return model


def normed(features: dict[str, Any]) -> keras.Model:
    """BatchNorm, Dropout, an Embedding, and metrics of several kinds."""
    ids = keras.ops.cast(features["a"] > 0, "int32")
    columns = [keras.ops.expand_dims(feature, -1) for feature in features.values()]
    x = layers.Concatenate()([*columns, layers.Embedding(4, 3)(ids)])
    x = layers.BatchNormalization(momentum=0.5)(layers.Dense(8, activation="relu")(x))
    x = layers.Dropout(0.2)(x)
    model = keras.Model(features, layers.Dense(1, activation="sigmoid", dtype="float32")(x))
    model.compile(
        optimizer=keras.optimizers.Adam(0.02),
        loss="binary_crossentropy",
        metrics=["accuracy", keras.metrics.AUC(name="auc")],
    )
    return model


class Scene:
    """What every scenario shares."""

    def __init__(self, dataset: Path, transform: Path, out: Path) -> None:
        self.dataset, self.transform = load_dataset(dataset), load_transform(transform)
        self.out = out
        with held_ports(4) as ports:
            cluster = local_cluster(ports, workers=2, servers=1)
            self.roles = Roles(cluster)
            self.connection: ClusterConnection = connect(cluster[0])
        self.preemption = Preemption()
        self.error = ""

    def fit(
        self,
        name: str,
        build: Callable[..., keras.Model],
        *,
        tell: Callable[[Progress], None] = lambda progress: None,
        batch_size: int = 1,
        callbacks: Sequence[keras.callbacks.Callback] = (),
        **settings: Any,
    ) -> tuple[dict[str, Any], BuiltModel]:
        precision = settings.get("precision", "float32")
        prepare_process(precision=precision, seed=0, deterministic=False)
        with self.connection.strategy.scope():
            built = build_model(build, self.transform, what="model:build")
        folder = self.out / name
        writer = Everywhere([JsonLines(folder / "metrics.jsonl")])
        answer: dict[str, Any] = {}
        try:
            result = fit_parameter_server(
                built,
                (self.dataset, self.transform),
                config=TrainConfig(**settings),
                resolved=resolved(batch_size, precision),
                connection=self.connection,
                context=RunContext(
                    memory_bytes=1 << 34,
                    checkpoints=folder / "checkpoints",
                    writer=writer,
                    on_progress=tell,
                    preemption=self.preemption,
                    heartbeat=process_heartbeat(),
                    callbacks=callbacks,
                ),
            )
            answer = {n: getattr(result, n) for n in ("steps", "repeated", "epochs", "metrics")}
        except UserError as error:
            self.error = error.line()
            answer = {"error": self.error, "exit_code": error.exit_code}
        finally:
            writer.close()
        found = newest_good(folder / "checkpoints")
        arrays = {} if found is None else found.arrays()

        def named(end: str) -> list[float]:
            return [float(np.ravel(v)[0]) for n, v in arrays.items() if n.endswith(end)]

        return answer | {
            "iterations": named("/iteration"),
            "moving_means": named("/moving_mean"),
            "eval_counts": named("/count"),
            "saved_step": None if found is None else found.step,
            "all_finite": all(np.isfinite(np.asarray(v, "float64")).all() for v in arrays.values()),
            "weight": float(np.ravel(built.model.trainable_variables[0].numpy())[0]),
        }, built


def resolved(batch_size: int, precision: Any) -> ResolvedTraining:
    return ResolvedTraining(
        batch_size=batch_size,
        accumulate=1,
        replicas=1,
        workers=2,
        steps_per_call=1,
        precision=precision,
        xla=False,
        strategy="parameter_server",
        lr_factor=1.0,
        why={},
    )


def counted(scene: Scene) -> dict[str, Any]:
    answer, _ = scene.fit("counted", constant, batch_size=ROWS_A_STEP, epochs=3)
    return answer


def counted_long(scene: Scene) -> dict[str, Any]:
    answer, _ = scene.fit("counted_long", constant, epochs=3)
    return answer


def learned(scene: Scene) -> dict[str, Any]:
    answer, built = scene.fit("learned", normed, batch_size=16, epochs=8, ema=0.8)
    # Counted by the server, against the same rows looked at here, one after the other.
    table = scene.dataset.table("eval").to_pandas()
    features = {name: tf.constant(table[name].to_numpy()) for name in ("a", "b")}
    lines = (scene.out / "learned" / "metrics.jsonl").read_text().splitlines()
    outputs = np.asarray(built.model(built.adapt(features), training=False))
    return answer | {
        "lines": [json.loads(line) for line in lines],
        "accuracy_here": float(((outputs[:, 0] > 0.5) == table["y"].to_numpy()).mean()),
    }


def gone_on(scene: Scene) -> dict[str, Any]:
    first, _ = scene.fit("gone_on", momentum, batch_size=7, epochs=1)
    again, _ = scene.fit("gone_on", momentum, batch_size=7, epochs=2)
    over, _ = scene.fit("gone_on", momentum, batch_size=7, epochs=2)
    return {"first": first, "again": again, "over": over}


def stopped_by_signal(scene: Scene) -> dict[str, Any]:
    def tell(progress: Progress) -> None:
        scene.preemption.requested = True

    first, _ = scene.fit("by_signal", momentum, epochs=2, tell=tell)
    scene.preemption.requested = False
    again, _ = scene.fit("by_signal", momentum, epochs=2)
    return {"first": first, "again": again}


def not_finite(scene: Scene) -> dict[str, Any]:
    answer, _ = scene.fit("not_finite", diverging, batch_size=7, epochs=5)
    # Calls still under way fail because their queue is gone, and make the next run fail.
    return answer | {"left_under_way": not scene.connection.coordinator.done()}


def half_precision(scene: Scene) -> dict[str, Any]:
    answer, _ = scene.fit("half", normed, batch_size=16, precision="mixed_float16", epochs=5)
    return answer


def refused(scene: Scene) -> dict[str, Any]:
    class EveryBatch(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            raise RuntimeError("never called")

    refusals: list[dict[str, Any]] = [
        {"deterministic": True},
        {"xla": True},
        {"callbacks": [EveryBatch()]},
    ]
    return {str(each): scene.fit("refused", constant, **each)[0]["error"] for each in refusals}


def back(scene: Scene) -> dict[str, Any]:
    """kill -9 of a worker that comes back."""
    kills: list[int] = []

    def tell(progress: Progress) -> None:
        if not kills:
            scene.roles.kill("worker 0")
            scene.roles.start_again("worker 0")
            kills.append(progress.step)

    answer, _ = scene.fit("back", momentum, epochs=2, tell=tell)
    at_work_again(scene, "worker 0")
    return answer | {"kills": kills}


def stays(scene: Scene) -> dict[str, Any]:
    """kill -9 of a worker that stays away."""
    kills: list[int] = []

    def tell(progress: Progress) -> None:
        if not kills:
            scene.roles.kill("worker 1")
            kills.append(progress.step)

    answer, _ = scene.fit("stays", momentum, batch_size=ROWS_A_STEP, epochs=2, tell=tell)
    return answer | {"kills": kills}


def at_work_again(scene: Scene, name: str) -> None:
    """Wait until TensorFlow has taken a worker back, which a short run does not wait for.

    It takes all of them back together, and waits for ever where another one stays away meanwhile.
    """
    scene.roles.wait_for(name)
    # Its first call fails, and says that it is another process now.
    scene.fit("settled", momentum, epochs=1)
    due = scene.connection.coordinator._cluster.failure_handler._cluster_due_for_update_or_finish
    end_s = time.monotonic() + RECOVERY_S
    while due.is_set():
        if time.monotonic() > end_s:
            raise TimeoutError(f"{name} was not taken back")
        time.sleep(0.1)


def sent_twice(scene: Scene) -> dict[str, Any]:
    """As when a worker dies after it has sent and before it says so; and one from an older pass."""
    batch = ({"a": tf.ones([1]), "b": tf.ones([1])}, tf.ones([1], tf.int64))
    with scene.connection.strategy.scope():
        built = build_model(momentum, scene.transform, what="model:build")
        outputs = built.model(built.adapt(batch[0]))
        built.model.compute_metrics(x=batch[0], y=batch[1], y_pred=outputs)
        built.model.optimizer.build(built.model.trainable_variables)
        worker = WorkerModel(built, seeds=[])
        inbox, send = open_inbox(worker, worker.train, lambda e: e, batch, batches=3)
    inbox.begin(10)
    for number in (10, 11, 11, 9, 10, 12):
        scene.connection.coordinator.schedule(send, args=(tf.constant(number, tf.int64), batch))
    scene.connection.coordinator.join()
    return inbox.take()._asdict() | {
        "iterations": int(built.model.optimizer.iterations.numpy()),
        "weight": float(np.ravel(built.model.trainable_variables[0].numpy())[0]),
    }


def stopped(scene: Scene) -> dict[str, Any]:
    """kill -STOP of a worker, which is resumed some seconds after the warning."""
    said: list[str] = []
    spoken, begun = threading.Event(), threading.Event()

    def hear(record: logging.LogRecord) -> None:
        said.append(record.getMessage())
        spoken.set()

    handler = logging.Handler()
    handler.emit = hear  # type: ignore[method-assign]  # a handler is its emit
    logging.getLogger("stoker.train.parameter_server").addHandler(handler)

    def go_on() -> None:
        # The other worker may have steps to do before no worker answers; then that lasts a while.
        spoken.wait(SILENCE_S)
        time.sleep(2.0)  # the silence goes on after it was reported
        scene.roles.send("worker 0", signal.SIGCONT)

    def tell(progress: Progress) -> None:
        # Before the first validation, for which the workers may not need a new function.
        if progress.step == PER_EPOCH and not begun.is_set():
            begun.set()
            scene.roles.send("worker 0", signal.SIGSTOP)
            threading.Thread(target=go_on, daemon=True).start()

    answer, _ = scene.fit("stopped", momentum, tell=tell, epochs=2, watchdog_s=2.0)
    return answer | {"said": said}


def server_gone(scene: Scene) -> dict[str, Any]:
    def tell(progress: Progress) -> None:
        scene.roles.kill("ps 0")

    # The scenario itself asks the dead server for a weight.
    with contextlib.suppress(tf.errors.UnavailableError):
        scene.fit("gone", constant, batch_size=ROWS_A_STEP, epochs=5, tell=tell)
    found = newest_good(scene.out / "gone" / "checkpoints")
    return {"error": scene.error, "saved_step": None if found is None else found.step}


SCENARIOS = (
    *(
        counted,
        counted_long,
        learned,
        gone_on,
        stopped_by_signal,
        not_finite,
        half_precision,
        refused,
    ),
    *(stopped, sent_twice, back, stays, server_gone),
)


def main() -> None:
    dataset, transform, out = map(Path, sys.argv[1:4])
    wanted = sys.argv[4:]
    # Keras asks for collections of garbage, of which what was imported is none.
    gc.freeze()
    scene = Scene(dataset, transform, out)
    try:
        for scenario in SCENARIOS:
            if scenario.__name__ in wanted:
                answer = scenario(scene)
                (out / f"{scenario.__name__}.json").write_text(json.dumps(answer))
    finally:
        scene.roles.end()
    sys.stdout.flush()
    # TensorFlow's own end waits for servers that are gone.
    os._exit(0)


if __name__ == "__main__":
    main()
