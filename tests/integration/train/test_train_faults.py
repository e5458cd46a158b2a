"""The catalogue's faults of training, row by row: where each is done, and those done nowhere else.

The rows are those of the fault catalogue, `shared/facts/faults.md`, section Training.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.compiled import compiled
from tests.integration.train.killed import checkpoints, newest, published, write_table

TESTS = Path(__file__).resolve().parents[2]

ROWS = {
    "27: kill -9 at random moments": (
        "integration/train/test_train_kill.py",
        "test_a_run_killed_at_random_instants_ends_as_one_that_never_was",
    ),
    "28: kill -9 while a checkpoint is written": (
        "integration/train/test_train_checkpoint_kill.py",
        "test_a_kill_at_any_call_of_a_save_loses_nothing_that_was_published",
    ),
    "28: kill -9 at every rename": (
        "integration/train/test_train_kill.py",
        "test_a_run_killed_before_its_renames_ends_as_one_that_never_was",
    ),
    "29, 30: SIGTERM, twice, SIGINT, SIGHUP, at the start, in a checkpoint, in validation": (
        "integration/train/test_train_preempted.py",
        "test_a_run_that_is_stopped_again_and_again_ends_as_an_undisturbed_one",
    ),
    "31: the disk is full at a checkpoint": (
        "unit/train/test_train_checkpoint_writer.py",
        "test_a_full_disk_says_need_and_free_and_leaves_the_older_one",
    ),
    "32: fsync or a write fails": (
        "integration/train/test_train_checkpoint_kill.py",
        "test_what_could_not_be_made_durable_is_not_published",
    ),
    "33: the newest checkpoint is damaged": (
        "unit/train/test_train_checkpoint_store.py",
        "test_a_damaged_newest_one_is_named_and_the_one_before_it_taken",
    ),
    "34: NaN in the data": (
        "integration/train/test_train_numbers.py",
        "test_a_nan_in_the_data_ends_the_run_at_its_step_with_its_feature_and_row",
    ),
    "34: NaN in a gradient only": (
        "integration/train/test_train_numbers.py",
        "test_a_gradient_that_is_not_finite_ends_the_run_at_its_step_though_the_loss_is",
    ),
    "34: roll back and skip, with a budget": (
        "integration/train/test_train_numbers.py",
        "test_a_spent_budget_of_rollbacks_ends_the_run",
    ),
    "35: divergence": (
        "integration/train/test_train_numbers.py",
        "test_divergence_is_reported_and_recorded",
    ),
    "35: the loss scale falls and falls": (
        "unit/train/test_train_health_trends.py",
        "test_a_scale_that_falls_and_falls_is_named_once_and_again_after_a_rise",
    ),
    "36, 37: a worker of two is killed, a worker of two is stopped": (
        "integration/train/test_train_multi_worker.py",
        "test_killed_and_stopped_workers_are_named_and_all_go_on_to_the_same_weights",
    ),
    "37: a stopped worker's stack": (
        "integration/cluster/test_cluster_launch.py",
        "test_a_stopped_worker_is_named_with_its_stack_and_all_go_on",
    ),
    "38: workers disagree": (
        "integration/train/test_train_multi_worker.py",
        "test_workers_that_do_not_agree_end_and_name_what_differs",
    ),
    "39: the chief dies": (
        "integration/cluster/test_cluster_launch.py",
        "test_the_first_worker_may_die_like_any_other",
    ),
    "39: a port is busy": (
        "unit/cluster/test_cluster_resolver.py",
        "test_a_port_on_which_something_listens_is_refused_with_its_number",
    ),
    "39: no orphan is left": (
        "integration/cluster/test_cluster_launch.py",
        "test_no_worker_is_left_when_the_launcher_is_killed",
    ),
    "40: the kernel kills for memory": (
        "integration/cluster/test_cluster_launch.py",
        "test_a_worker_that_the_kernel_kills_for_memory_is_named_so",
    ),
    "41: a step does not fit": (
        "integration/train/test_train_numbers.py",
        "test_a_step_that_does_not_fit_is_cut_and_learns_the_same",
    ),
    "41: train.on_oom: stop": (
        "integration/train/test_train_numbers.py",
        "test_on_oom_stop_gives_the_figure",
    ),
    "42: data, configuration or code changed on resume": (
        "integration/train/test_train_preempted.py",
        "test_what_has_changed_is_named_and_goes_on_only_where_it_is_accepted",
    ),
    "43: two runs in one folder": (
        "integration/app/test_app_caching.py",
        "test_a_second_process_on_the_same_run_is_refused_with_the_owner",
    ),
    "43: the owner is dead": (
        "integration/app/test_app_caching.py",
        "test_the_lock_of_an_owner_that_was_killed_is_taken_over",
    ),
    "44: a read-only folder": (
        "integration/app/test_app_output.py",
        "test_a_read_only_folder_is_an_error_in_the_first_second",
    ),
    "45: the clock jumps by a day": (
        "integration/train/test_train_faults.py",
        "test_a_clock_that_jumps_by_days_changes_no_time_and_no_retention",
    ),
    "46: a callback raises": (
        "integration/train/test_train_keras_callbacks.py",
        "test_the_error_of_a_callback_names_the_users_line",
    ),
    "46: a generator raises, or ends early, in the middle of training": (
        "integration/app/test_app_own_dataset.py",
        "test_a_generator_that_fails_in_a_later_pass_is_named_and_nothing_is_lost",
    ),
    "47: stdout has no reader, the log's disk is full, LANG=C": (
        "integration/app/test_app_output.py",
        "test_training_goes_on_without_a_reader_and_with_a_full_disk_of_logs",
    ),
    "48: a limit of open files": (
        "integration/cluster/test_cluster_launch.py",
        "test_more_processes_than_descriptors_allow_are_refused_in_one_line",
    ),
    "48: a limit of processes": (
        "integration/cluster/test_cluster_launch.py",
        "test_a_kernel_that_starts_no_more_processes_is_named",
    ),
    "49: a bit of the weights flips": (
        "unit/train/test_train_checkpoint_store.py",
        "test_each_of_100_flipped_bits_is_found",
    ),
    "50: a gate's metric is NaN or missing": (
        "unit/evaluate/test_evaluate_gates.py",
        "test_a_metric_that_is_not_a_number_fails_every_gate_that_names_it",
    ),
    "50: the split is empty": (
        "unit/evaluate/test_evaluate_gates.py",
        "test_an_empty_split_fails_though_a_metric_were_given",
    ),
    "50: a gated slice has too few rows": (
        "unit/evaluate/test_evaluate_gates.py",
        "test_a_slice_under_min_rows_fails_however_good_it_looks",
    ),
    "50: no baseline yet": (
        "unit/evaluate/test_evaluate_gates.py",
        "test_without_a_baseline_max_drop_says_so_and_only_the_other_limits_speak",
    ),
    "50: a gate that says no ends the run and pushes nothing": (
        "integration/app/test_app_caching.py",
        "test_a_worse_model_fails_max_drop_each_time_and_is_not_pushed",
    ),
}


@pytest.mark.parametrize("row", ROWS)
def test_the_test_of_the_fault_is_there(row: str) -> None:
    file, name = ROWS[row]

    tree = ast.parse((TESTS / file).read_text())

    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_no_row_of_the_section_is_left_out() -> None:
    numbers = {int(n) for row in ROWS for n in row.partition(":")[0].split(",")}

    assert numbers == set(range(27, 51))


@pytest.fixture(scope="module")
def jumping_clock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library to be preloaded, by which the time of day jumps between two days."""
    library = compiled(
        Path(__file__).with_name("jumping_clock.c"),
        tmp_path_factory.mktemp("clock") / "jumping.so",
    )
    seen = subprocess.run(
        [
            sys.executable,
            "-c",
            "import time\nfor _ in range(30):\n print(time.time());time.sleep(.05)",
        ],
        env=os.environ | {"LD_PRELOAD": str(library)},
        capture_output=True,
        text=True,
        check=True,
    )
    times = [float(line) for line in seen.stdout.split()]
    assert max(times) - min(times) > 86_000, "it jumps"
    return library


SLOW_INPUT_PY = """


def dataset(split):
    rng = np.random.default_rng(len(split))
    a, b = rng.normal(size=(2, 40, 8)).astype(np.float32)

    def generate():
        for number in range(len(a)):
            time.sleep(0.03 if split == "train" else 0.0)
            yield {"a": a[number], "b": b[number]}, (a[number] + b[number] > 0).astype(np.int64)

    column = tf.TensorSpec([8], tf.float32)
    signature = {"a": column, "b": column}, tf.TensorSpec([8], tf.int64)
    made = tf.data.Dataset.from_generator(generate, output_signature=signature)
    # TensorFlow's autotuner waits for as long as the clock was set back when an iterator ends.
    options = tf.data.Options()
    options.autotune.enabled = False
    return made.with_options(options)
"""


def write_slow_input(folder: Path) -> None:
    """The same with a dataset that makes a step wait for a third of its time."""
    write_table(folder)
    model, settings = folder / "model.py", folder / "stoker.yaml"
    model.write_text(f"import numpy as np\n{model.read_text()}{SLOW_INPUT_PY}")
    lines = settings.read_text().replace("{source: data.csv}", "model:dataset").splitlines()
    kept = [line for line in lines if line not in ("label: y", "  batch_size: 8")]
    settings.write_text("\n".join(kept))


@pytest.mark.soak
@pytest.mark.slow
def test_a_clock_that_jumps_by_days_changes_no_time_and_no_retention(
    jumping_clock: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "small"
    write_slow_input(folder)
    runs = {"calm": "", "jumping": str(jumping_clock)}
    # Both at once: most of their time they wait.
    started = {}
    for name, library in runs.items():
        # Not `train.deterministic`, under which TensorFlow's own clock is not read.
        command = [sys.executable, "-m", "stoker", "train", str(folder)]
        command += ["--set", f"runs={tmp_path / name}", "--set", "train.deterministic=false"]
        with (tmp_path / f"{name}.txt").open("w") as said:
            started[name] = subprocess.Popen(
                command,
                env=os.environ | {"STEP_S": "0.02", "LD_PRELOAD": library},
                stdout=said,
                stderr=said,
            )
    for name, process in started.items():
        assert process.wait() == 0, (tmp_path / f"{name}.txt").read_text()

    jumping = tmp_path / "jumping"
    text = (checkpoints(jumping).parent / "metrics.jsonl").read_text()
    calls = [line for line in map(json.loads, text.splitlines()) if "step_time_s" in line]
    assert len(calls) >= 6
    for call in calls:
        assert 0.02 <= call["step_time_s"] < 2
        assert 0 <= call["input_wait"] < 0.9
    assert published(jumping) == published(tmp_path / "calm")
    ours, theirs = (newest(tmp_path / name).arrays() for name in runs)
    for name, value in ours.items():
        np.testing.assert_allclose(theirs[name], value, rtol=1e-4, atol=1e-6)
