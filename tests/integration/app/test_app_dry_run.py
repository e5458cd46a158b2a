"""`stoker train --dry-run`: what would go wrong later is known now, and nothing is recorded."""

from __future__ import annotations

import io
import json
from collections.abc import Callable

import pytest
from rich.console import Console

from stoker.app.dry_run import DryRunResult, dry_run
from stoker.app.experiment import load_experiment
from stoker.cli.main import invoke
from stoker.cli.summary import print_dry_run
from stoker.core.errors import EXIT_DONE, EXIT_USER, ConfigError, UserError

from .conftest import Folder, Recorder


def rehearse(folder: Folder, *overrides: str) -> DryRunResult:
    return dry_run(load_experiment(folder.path, overrides=overrides), Recorder())


def test_a_dry_run_shows_placement_memory_and_the_served_model(
    make_folder: Callable[[], Folder],
) -> None:
    folder = make_folder()
    found = rehearse(folder)

    steps, footprint = found.steps, found.steps.footprint
    # Embedding 4 x 4, dense (4 + 1) x 8 + 8, answer 8 + 1.
    assert footprint.parameters == footprint.trainable == 16 + 48 + 9
    assert footprint.weights_bytes == 4 * 73 + 16  # and Dropout's seed
    assert footprint.gradients_bytes == 4 * 73
    assert footprint.optimizer_bytes > 2 * 4 * 73
    # At least the 32 rows that leave the hidden layer, which its ReLU and the next layer read.
    assert 32 * 8 * 4 < footprint.activations_bytes < 32 * 8 * 4 * 20
    (placed,) = steps.placed
    assert placed.device == "CPU:0"
    assert "MatMul" in placed.kinds or placed.operations > 50
    assert steps.losses[0] > 0
    assert steps.first_step_s > steps.second_step_s > 0
    behind = ["serving_transformed", "transform_features"]
    assert found.served.signatures == ["serving_default", "serving_examples", *behind]
    shown = io.StringIO()
    print_dry_run(Console(file=shown, width=100), found)
    for part in ("device placement", "CPU:0", "73 trainable", "activations", "serving_examples"):
        assert part in shown.getvalue()
    reason = steps.resolved.why["strategy"]
    assert reason
    assert f"one_device, 1 replica: {reason}" in shown.getvalue()


def test_a_dry_run_does_not_change_the_run(
    make_folder: Callable[[], Folder], capsys: pytest.CaptureFixture[str]
) -> None:
    """With a strategy of several processes, which is rehearsed in one."""
    folder = make_folder()
    cluster = "train.strategy=multi_worker"
    before, _ = folder.run(cluster, until="transform")
    files = set(before.run.rglob("*"))
    command = ["train", str(folder.path), "--dry-run", "--json", "--set", cluster]
    assert invoke(command, debug=False) == EXIT_DONE

    facts = json.loads(capsys.readouterr().out)
    assert facts["run"] == str(before.run)
    assert facts["steps"]["resolved"]["strategy"] == "one_device"
    assert set(before.run.rglob("*")) == files
    assert json.loads((before.run / "run.json").read_text())["finished"] is None


LAYER = """

@keras.saving.register_keras_serializable()
class Odd(layers.Layer):
    def call(self, x, training=False):
        return x if training else {answer}
"""


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ('x * float("nan")', "must be finite"),
        pytest.param(
            "tf.ensure_shape(tf.numpy_function(lambda a: a, [x], tf.float32), x.shape)",
            "PyFunc",
            marks=pytest.mark.soak,
        ),
    ],
)
def test_a_model_that_cannot_be_served_is_the_users_error(
    make_folder: Callable[[], Folder], answer: str, said: str
) -> None:
    folder = make_folder()
    folder.edit("model.py", "\n\nUNITS = 8\n", LAYER.format(answer=answer) + "\n\nUNITS = 8\n")
    folder.edit(
        "model.py",
        'keras.Model(features, layers.Dense(1, activation="sigmoid")(x))',
        'keras.Model(features, Odd()(layers.Dense(1, activation="sigmoid")(x)))',
    )

    with pytest.raises(ConfigError, match=f"the exported model must answer.*{said}") as caught:
        rehearse(folder)
    assert caught.value.exit_code == EXIT_USER


def test_a_loss_of_nan_is_found_in_the_first_steps(
    make_folder: Callable[[], Folder],
) -> None:
    folder = make_folder()
    folder.edit("model.py", 'loss="binary_crossentropy"', "loss=lambda y, p: p * float('nan')")

    with pytest.raises(UserError, match="of the first steps must be finite numbers"):
        rehearse(folder)
