"""Every callback that Keras ships trains to the end, also over kill -9, with a last epoch that is not the best."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import keras
import pytest
from tests.integration.train.killed import Trainer, newest, outcome, write_table

CALLBACKS = """

def turned(epoch, rate):
    # Uphill from the third epoch on.
    return 0.1 if epoch < 2 else -0.02


def callbacks():
    out = Path(os.environ["OUT"])
    given = keras.callbacks
    return [
        given.LearningRateScheduler(turned),
        given.ReduceLROnPlateau(monitor="val_loss", patience=1, factor=0.5),
        given.CSVLogger(out / "log.csv"),
        given.ModelCheckpoint(out / "best.weights.h5", save_best_only=True, save_weights_only=True),
        given.TensorBoard(out / "board"),
        given.TerminateOnNaN(),
        given.LambdaCallback(on_epoch_end=lambda epoch, logs: (out / f"epoch-{epoch}").touch()),
        given.ProgbarLogger(),
        given.RemoteMonitor(root="http://127.0.0.1:9"),
        given.EarlyStopping(monitor="val_loss", patience=2, restore_best_weights=True),
    ]
"""

LEFT_OUT = {"BackupAndRestore", "SwapEMAWeights", "OrbaxCheckpoint"}
"""Two that Stoker refuses, and one that needs a package that is not installed."""

BASES = {"Callback", "CallbackList", "History"}
"""Classes that are not callbacks for users to pass; History is always there."""


def write(folder: Path) -> None:
    write_table(folder)
    settings = folder / "stoker.yaml"
    settings.write_text(settings.read_text().replace("epochs: 3", "epochs: 6"))
    code = folder / "model.py"
    code.write_text(code.read_text().partition("\n\ndef callbacks")[0] + CALLBACKS)


def remembered(runs: Path, out: Path) -> dict[str, Any]:
    """What must be the same, wherever the callbacks write."""
    found: dict[str, Any] = json.loads(json.dumps(outcome(runs)).replace(str(out), "OUT"))
    return found


def test_all_of_them_are_tried() -> None:
    shipped = {name for name, kind in vars(keras.callbacks).items() if isinstance(kind, type)}
    tried = {name for name in shipped if f"given.{name}(" in CALLBACKS}

    assert shipped - tried == LEFT_OUT | BASES


@pytest.mark.soak
def test_keras_callbacks_end_and_go_on_over_kill_9(trainer: Trainer, tmp_path: Path) -> None:
    folder, outs, runs = tmp_path / "small", dict[str, Path](), dict[str, Path]()
    write(folder)
    for name in ("calm", "killed"):
        outs[name], runs[name] = tmp_path / f"out-{name}", tmp_path / name
        outs[name].mkdir()
    calm: dict[str, Any] = {"environment": {"OUT": str(outs["calm"])}}
    assert trainer.run(folder, runs["calm"], **calm) == 0, trainer.said()
    assert trainer.run(folder, runs["calm"], **calm) == 0, "a finished run is run again"

    killed: dict[str, Any] = {"environment": {"OUT": str(outs["killed"])}}
    assert trainer.run(folder, runs["killed"], verb="transform", **killed) == 0, trainer.said()
    code = trainer.run(folder, runs["killed"], kill=12, **killed)
    assert code == -signal.SIGKILL, trainer.said()
    assert trainer.run(folder, runs["killed"], **killed) == 0, trainer.said()

    facts = newest(runs["calm"]).facts
    epochs = facts["position"]["step"] // facts["position"]["per_epoch"]
    assert facts["position"]["best_epoch"] < epochs
    assert facts["callbacks"]["EarlyStopping"]["attributes"]["stopped_epoch"] > 0
    for one, other in zip(
        remembered(runs["calm"], outs["calm"]).items(),
        remembered(runs["killed"], outs["killed"]).items(),
        strict=True,
    ):
        assert one == other
    logs = [(out / "log.csv").read_text() for out in outs.values()]
    assert logs[0] == logs[1]
    assert logs[0].count("\n") == 1 + epochs
