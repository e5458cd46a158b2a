"""An elastic training goes on with another number of workers as if nothing had happened."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.integration.train.killed import TESTS_OWN, Trainer, newest, runs_of, write_images

from stoker.data.dataset import Dataset
from stoker.data.features.preprocessing.transform import Transform

pytestmark = pytest.mark.timeout(3600)

AGREES = 1e-5
"""Most relative difference of the losses in float32, over the first 100 steps after a change."""

LONG = {"epochs": 20}
"""140 steps of 32 rows, of which every seventh has 18: four virtual workers have 8, 8, 2 and none of them."""

UPDATE = {"clip_norm": 0.5, "ema": 0.9, "scale_lr": "linear"}

KEPT: dict[str, dict[str, Any]] = {
    "one replica": {"model": "normed", "legs": [[1, None]], "settings": LONG},
    "2, 1 and 2": {
        "model": "normed",
        "legs": [[2, 20], [1, 40], [2, None]],
        "settings": LONG,
    },
    "float16": {
        "model": "normed",
        "legs": [[1, None]],
        "settings": {"precision": "mixed_float16", **UPDATE},
    },
    "float16 on 2": {
        "model": "normed",
        "legs": [[2, None]],
        "settings": {"precision": "mixed_float16", **UPDATE},
    },
    "embedded, 4 a call": {"model": "embedded", "legs": [[1, None]], "steps_per_call": 4},
    "embedded, 4 a call, on 2": {"model": "embedded", "legs": [[2, None]], "steps_per_call": 4},
    "XLA": {"model": "normed", "legs": [[1, None]], "settings": {"xla": True}},
    "XLA on 2": {"model": "normed", "legs": [[2, None]], "settings": {"xla": True}},
    "masks": {"model": "masks", "legs": [[1, 1]]},
}

REFUSED = {
    "number": "ReplicaNumber 'by_number', which calls tf.distribute.get_replica_context",
    "count": "ReplicaCount 'by_count', which calls tf.distribute.get_strategy",
    "strategy": "WithStrategy 'if_several', which calls tf.distribute.has_strategy",
    "synced": "BatchNormalization 'batch_normalization', which calls tf.distribute.get_replica_context",
    "noise": "which draws by TensorFlow's RandomStandardNormal instead of keras.random",
    "unknown": "variable 'hiding/Variable', which is not a weight of a Keras layer",
    "seen": "state 'looking/units' of dtype int32, which has no mean",
    "spectral": "weight 'spectral/dense/kernel', which the forward pass changes",
    "metric": "metric 'largest', whose class Largest updates its state itself",
    "own_step": "Own.train_step, which does the work of Stoker's step",
}

SOAK = ("XLA", "XLA on 2", "embedded, 4 a call", "embedded, 4 a call, on 2")
"""Scenarios of `make soak` alone."""


def run_scenarios(
    trainer: Trainer, scenarios: list[dict[str, Any]], data: tuple[Dataset, Transform], out: Path
) -> list[dict[str, Any]]:
    """Run all in one process of their own; `weights` are the last ones, by path."""
    trainer.script(
        Path(__file__).with_name("elastic_scenarios.py"),
        *(data[0].root, data[1].root, out),
        stdin=json.dumps(scenarios),
    )
    results: list[dict[str, Any]] = json.loads((out / "results.json").read_text())
    for index, result in enumerate(results):
        if "losses" in result:
            result["weights"] = dict(np.load(out / str(index) / "weights.npz"))
    return results


@pytest.fixture(scope="module")
def trained(
    in_soak: bool,
    trainer: Trainer,
    dataset: Dataset,
    transform: Transform,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, dict[str, Any]]:
    """Scenario, or refused model -> what came of it."""
    scenarios = {name: one for name, one in KEPT.items() if in_soak or name not in SOAK}
    scenarios |= {name: {"model": name, "legs": [[1, None]]} for name in REFUSED}
    out = tmp_path_factory.mktemp("elastic")
    found = run_scenarios(trainer, list(scenarios.values()), (dataset, transform), out)
    return dict(zip(scenarios, found, strict=True))


def require_same(one: dict[str, Any], other: dict[str, Any], *, steps: int) -> None:
    """The same losses, step by step, and the same weights and averages at the end."""
    assert "losses" in one, one
    assert "losses" in other, other
    assert len(one["losses"]) == len(other["losses"]) == steps
    np.testing.assert_allclose(one["losses"], other["losses"], rtol=AGREES)
    for path, weight in one["weights"].items():
        np.testing.assert_allclose(other["weights"][path], weight, rtol=1e-4, atol=1e-5)
    for name, value in one["metrics"].items():
        assert other["metrics"][name] == pytest.approx(value, rel=1e-5), name


def test_losses_agree_after_changes_of_the_number_of_workers(trained: dict[str, Any]) -> None:
    """With Dropout and BatchNormalization; in an epoch's last step one virtual worker has no rows."""
    require_same(trained["one replica"], trained["2, 1 and 2"], steps=140)


def test_a_loss_scale_and_an_average_of_the_weights_do_not_depend_on_the_workers(
    trained: dict[str, Any],
) -> None:
    one, other = trained["float16"], trained["float16 on 2"]

    np.testing.assert_allclose(one["losses"], other["losses"], rtol=2e-3)
    assert one["metrics"]["val_loss"] == pytest.approx(other["metrics"]["val_loss"], rel=2e-3)


@pytest.mark.soak
@pytest.mark.parametrize("name", ["XLA", "embedded, 4 a call"])
def test_other_steps_do_not_depend_on_the_workers(trained: dict[str, Any], name: str) -> None:
    other = next(each for each in trained if each.startswith(name) and each.endswith("on 2"))
    require_same(trained[name], trained[other], steps=len(trained[name]["losses"]))


def test_virtual_workers_drop_units_of_their_own(trained: dict[str, Any]) -> None:
    """Their mean has other values than 0 and 1; and in a full step all of them count alike."""
    (units,) = [value for path, value in trained["masks"]["weights"].items() if "units" in path]

    assert {0.25, 0.5, 0.75} <= set(units) <= {0.0, 0.25, 0.5, 0.75, 1.0}


@pytest.mark.parametrize("model", list(REFUSED))
def test_what_depends_on_the_worker_is_refused_by_name(trained: dict[str, Any], model: str) -> None:
    line = trained[model]["refused"]

    assert line.startswith("with train.elastic a step must not depend on which worker")
    assert REFUSED[model] in line
    assert line.endswith("Change the model, or remove train.elastic.")


IMAGES_YAML = """\
name: small
data: {source: data, images: {size: [16, 16]}}
model: model:build
label: label
train:
  elastic: {min: 1, max: 4}
  batch_size: 5
  steps_per_call: 1
  precision: float32
  intra_op_threads: 1
  inter_op_threads: 1
  callbacks: model:callbacks
  augment: {flip: 0.5}
  checkpoint: {every_steps: 50}
  tensorboard: {histograms_every_steps: 0, gradients: false, graph: false}
"""

STOP_PY = """

class Stop(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if epoch == 5 and "MARK" in os.environ:
            try:
                open(os.environ["MARK"], "x").close()
            except FileExistsError:
                return
            os.kill(os.getppid(), signal.SIGTERM)


def callbacks():
    return [Stop()]
"""
"""One of the workers asks `stoker train` to end after the sixth epoch."""


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """48 images to train with: two full steps and one of 8 rows, of which the last workers have none."""
    folder = tmp_path_factory.mktemp("elastic") / "small"
    folder.mkdir()
    write_images(folder)
    (folder / "stoker.yaml").write_text(IMAGES_YAML)
    model = (folder / "model.py").read_text().partition("\n\ndef callbacks")[0]
    (folder / "model.py").write_text(f"import os\nimport signal\n\n{model}{STOP_PY}")
    (folder / ".stokerignore").write_text(TESTS_OWN)
    return folder


def losses_of(runs: Path) -> list[float]:
    """The loss of every step of the only run."""
    (run,) = runs_of(runs)
    lines = map(json.loads, (run / "train" / "metrics.jsonl").read_text().splitlines())
    by_step = {
        line["step"]: line["loss"] for line in lines if "loss" in line and "val_loss" not in line
    }
    return [by_step[step] for step in sorted(by_step)]


@pytest.mark.multiworker
@pytest.mark.parametrize(
    "sizes", [(2, 1), pytest.param((4, 2), marks=pytest.mark.soak)], ids=["2 to 1", "4 to 2"]
)
def test_a_run_goes_on_with_another_number_of_workers(
    images: Path, trainer: Trainer, tmp_path: Path, sizes: tuple[int, int]
) -> None:
    """Its losses are those of a run that keeps its workers: `make soak`'s as many as before, else one, which starts faster.

    `make soak` trains 100 steps after the change; in `make test` a run of one process does
    (`test_losses_agree_after_changes_of_the_number_of_workers`).
    """
    before, after = (["--workers", str(size)] if size > 1 else [] for size in sizes)
    epochs, kept = (15, after) if sizes == (2, 1) else (50, before)
    chosen = ("--set", f"train.epochs={epochs}")
    unchanged, changing = tmp_path / "unchanged", tmp_path / "changing"
    marked = {"MARK": str(tmp_path / "stopped")}

    assert trainer.run(images, unchanged, *kept, *chosen) == 0, trainer.said()
    code = trainer.run(images, changing, *before, *chosen, environment=marked)
    assert code == 75, trainer.said()
    changed = newest(changing).facts["position"]["step"]
    assert 18 <= changed < epochs * 3, "a signal takes some steps to arrive"
    assert trainer.run(images, changing, "--workers", "3", *chosen) == 2
    assert "must have 1, 2, 4 workers" in trainer.said()
    assert trainer.run(images, changing, *after, *chosen) == 0, trainer.said()

    ours, theirs = losses_of(changing), losses_of(unchanged)
    assert len(ours) == len(theirs) == epochs * 3
    np.testing.assert_allclose(ours[: changed + 100], theirs[: changed + 100], rtol=AGREES)
