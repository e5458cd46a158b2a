"""Commands of every kind under the profile: they behave as without it, however they end."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from stoker.cli.commands.profile import profile_script_command
from stoker.core.errors import UserError
from stoker.scriptprofile import ScriptProfile, profile_script

SCRIPTS = Path(__file__).resolve().parent / "scripts"


def profile(folder: Path, *command: str, seconds: float | None = None) -> tuple[ScriptProfile, str]:
    """The profile without the MFU (see `COUNTED` of test_tune_scripts.py), and what was printed."""
    with (folder / "printed").open("w+") as stream:
        profiled = profile_script(
            command,
            folder=folder / "p",
            seconds=seconds,
            stdout=stream.fileno(),
            grace_s=20.0,
            mfu=False,
        )
        stream.seek(0)
        return profiled, stream.read()


def test_a_program_without_tensorflow_is_reported_as_such(tmp_path: Path) -> None:
    profiled, printed = profile(
        tmp_path, sys.executable, "-c", "print('hello'); raise SystemExit(7)"
    )

    assert (profiled.exit_code, printed, profiled.ended_by) == (7, "hello\n", "itself")
    assert profiled.ending().startswith("the script failed: exit code 7; ")
    assert profiled.note().startswith("it failed before it imported TensorFlow")
    assert (profiled.loops, profiled.findings, profiled.failures) == ((), (), ())
    assert profiled.peak_memory_bytes == 0


def test_a_program_that_is_not_python_is_run_too(tmp_path: Path) -> None:
    profiled, printed = profile(tmp_path, "sh", "-c", "echo shell; kill -TERM $$")

    assert (profiled.exit_code, printed) == (128 + signal.SIGTERM, "shell\n")
    assert profiled.ending().startswith("the script failed: exit code 143, from SIGTERM; ")


def test_the_report_on_a_program_without_tensorflow_that_ends_well_says_how_tensorflow_could_be_hidden(
    tmp_path: Path,
) -> None:
    profiled, _ = profile(tmp_path, "true")

    assert not profiled.failed
    assert profiled.note().startswith("TensorFlow was not imported (or Python was started with -E")


@pytest.mark.parametrize(
    ("command", "fix"),
    [
        ([], "Write `stoker profile -- python train.py`."),
        (["no-such-program"], "Check the program's name"),
        (["train.py"], "Write `stoker profile -- python train.py`."),
    ],
)
def test_what_cannot_be_started_is_the_users_to_mend(
    tmp_path: Path, command: list[str], fix: str
) -> None:
    with pytest.raises(UserError) as refused:
        profile_script(command, folder=tmp_path)

    assert fix in refused.value.line()


def test_a_script_that_raises_is_profiled_and_fails_as_it_would(tmp_path: Path) -> None:
    folder = tmp_path / "a folder with spaces"
    folder.mkdir()
    script = shutil.copy(SCRIPTS / "raises.py", folder / "my script.py")
    # In a process of its own, so that both of its streams are real.
    code = (
        "import sys; from pathlib import Path; import typer\n"
        "from stoker.cli.commands.profile import profile_script_command as run\n"
        "try: run(sys.argv[2:], as_json=True, out=Path(sys.argv[1]))\n"
        "except typer.Exit as ended: sys.exit(ended.exit_code)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, str(folder / "out"), sys.executable, str(script)],
        capture_output=True,
        text=True,
    )

    profiled = json.loads(ended.stdout)
    assert ended.returncode == profiled["exit_code"] == 1
    assert [(loop["kind"], loop["line"], loop["steps"]) for loop in profiled["loops"]] == [
        ("fit", 11, 2)
    ]
    assert profiled["watcher_failures"] == []
    for said in ("on stdout", "on stderr", "RuntimeError: as it was written"):
        assert said in ended.stderr
    assert json.loads((folder / "out" / "profile.json").read_text()) == profiled
    assert "my script.py" in (folder / "out" / "profile.html").read_text()


KILLING = """\
        import glob, os, time
        begun_s, folder = time.time(), os.environ["STOKER_WATCH_FOLDER"]
        # The watcher writes each second what has changed since.
        while time.time() < begun_s + 30 and not any(
            os.path.getmtime(facts) > begun_s for facts in glob.glob(f"{folder}/facts-*.json")
        ):
            time.sleep(0.05)
        os.kill(os.getpid(), 9)
"""


def test_a_script_that_kills_itself_leaves_what_it_did(tmp_path: Path) -> None:
    # SIGKILL leaves no time to write: only what was written before counts.
    text = (SCRIPTS / "endless.py").read_text()
    script = tmp_path / "killed.py"
    script.write_text(text.replace("    if number == 50:\n", f"    if number == 50:\n{KILLING}"))

    profiled, _ = profile(tmp_path, sys.executable, str(script))

    assert (profiled.exit_code, profiled.ended_by) == (128 + signal.SIGKILL, "itself")
    [loop] = profiled.loops
    assert loop.steps == 50
    assert script.read_text().splitlines()[loop.place.line - 1].startswith("for number, x in")


def test_a_command_without_end_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    noted = tmp_path / "pid"
    waits = f"import os, time; open({str(noted)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {waits!r}])"

    profiled, _ = profile(tmp_path, sys.executable, "-c", code, seconds=5.0)

    assert (profiled.exit_code, profiled.ended_by) == (0, "time")
    state = Path("/proc") / noted.read_text() / "stat"
    # The process that adopts it may not have reaped it yet: then it is a zombie.
    assert not state.exists() or state.read_text().rpartition(") ")[2][0] == "Z"


def test_a_signal_is_passed_on_and_what_was_seen_is_kept(tmp_path: Path) -> None:
    code = (
        "import json, sys; from pathlib import Path\n"
        "from stoker.scriptprofile import profile_script\n"
        "found = profile_script(sys.argv[2:], folder=Path(sys.argv[1]), mfu=False)\n"
        "print(json.dumps(found.to_json()))\n"
    )
    command = [
        sys.executable,
        "-c",
        code,
        str(tmp_path),
        sys.executable,
        str(SCRIPTS / "endless.py"),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "under way\n"
        os.kill(process.pid, signal.SIGINT)
        profiled = json.loads(process.stdout.read())

    # The script had no handler: Python ends by KeyboardInterrupt, and says so by its signal.
    assert (profiled["exit_code"], profiled["ended_by"]) == (128 + signal.SIGINT, "signal")
    assert profiled["loops"][0]["steps"] >= 50


FORKS = """
import multiprocessing
import keras, numpy as np, tensorflow as tf

def train(results):
    data = tf.data.Dataset.from_tensor_slices((np.ones((400, 4), "float32"), np.ones(400))).batch(4)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    results.put(len(model.fit(data, epochs=2, verbose=0).epoch))

if __name__ == "__main__":
    results = multiprocessing.Queue()
    child = multiprocessing.get_context("fork").Process(target=train, args=(results,))
    child.start()
    print(results.get())
    child.join()
"""


@pytest.mark.soak
def test_training_in_a_forked_child_is_seen(tmp_path: Path) -> None:
    script = tmp_path / "forks.py"
    script.write_text(FORKS)

    profiled, printed = profile(tmp_path, sys.executable, str(script))

    assert (profiled.exit_code, printed, profiled.failures) == (0, "2\n", ())
    [loop] = profiled.loops
    assert (loop.kind, loop.place.line, loop.steps, loop.passes) == ("fit", 9, 200, 2)


def test_what_lies_in_the_folder_already_stays(tmp_path: Path) -> None:
    (tmp_path / "watched").mkdir()
    (tmp_path / "watched" / "data.csv").write_text("precious\n")

    profile_script([sys.executable, "-c", ""], folder=tmp_path)

    assert (tmp_path / "watched" / "data.csv").read_text() == "precious\n"
    assert [path.name for path in tmp_path.iterdir()] == ["watched"]


def test_a_folder_that_cannot_be_created_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file\n")

    for folder in (tmp_path / "taken" / "p", Path("/proc/nowhere"), tmp_path / ("x" * 300)):
        with pytest.raises(UserError) as refused:
            profile_script(["true"], folder=folder)

        assert "must be a folder that can be written" in refused.value.line()
        assert "--out" in refused.value.line()


def test_a_script_whose_name_is_not_utf_8_has_a_page_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script = os.fsdecode(b"tr\xff.py")
    Path(script).write_text("raise SystemExit(5)\n")

    with pytest.raises(typer.Exit) as ended:
        profile_script_command([sys.executable, script], out=tmp_path / "out")

    assert ended.value.exit_code == 5
    assert "tr\\udcff.py" in (tmp_path / "out" / "profile.html").read_text()


def warned(errors: Path) -> list[str]:
    """What stands on stderr, without TensorFlow's own log, which has times in it."""
    return [line for line in errors.read_text().splitlines() if not re.match(r"[IWE]\d{4} ", line)]


@pytest.mark.soak
def test_a_launcher_and_a_module_behave_as_without_us(tmp_path: Path) -> None:
    """A shell script that starts a Python that starts a Python that trains all sorts of models."""
    wrapper = tmp_path / "launch"
    wrapper.write_text(f'#!/bin/sh\ncd "{SCRIPTS}" && exec "{sys.executable}" launcher.py "$@"\n')
    wrapper.chmod(0o755)

    def command(errors: str) -> list[str]:
        return ["sh", "-c", '"$0" --epochs 3 2> "$1"', str(wrapper), str(tmp_path / errors)]

    with subprocess.Popen(command("plain"), stdout=subprocess.PIPE, text=True) as plain:
        profiled, printed = profile(tmp_path, *command("watched"))
        plain_printed, _ = plain.communicate()

    assert plain.returncode == profiled.exit_code == 0
    assert profiled.failures == ()
    assert printed == plain_printed
    assert warned(tmp_path / "watched") == warned(tmp_path / "plain")
    kinds = [loop.kind for loop in profiled.loops]
    assert kinds.count("fit") == 4
    assert {"inside", "dataset"} <= set(kinds)
    assert {Path(loop.place.file).name for loop in profiled.loops} == {"train.py"}
    dropout, *_, own = (loop for loop in profiled.loops if loop.kind == "fit")
    assert dropout.rounds, "the ceiling was measured between the steps of a model with Dropout"
    assert "RandomStandardNormal" in own.no_ceiling


def test_the_table_is_printed_after_what_the_script_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = typer.Typer()

    @app.command()
    def run(command: list[str]) -> None:
        profile_script_command(command, out=tmp_path / "out")

    monkeypatch.setenv("COLUMNS", "120")
    ended = CliRunner().invoke(app, ["--", sys.executable, "-c", "import no_such_module"])

    assert ended.exit_code == 1
    first, second, *_ = (line for line in ended.stdout.splitlines()[1:] if line.strip())
    assert first.startswith("profile of ")
    assert second.startswith(
        "the script failed: exit code 1; all of the following was seen before that"
    )
    assert ended.stdout.index("the script failed") < ended.stdout.index(
        "before it imported TensorFlow"
    )
    assert (tmp_path / "out" / "profile.html").is_file()


def test_negative_seconds_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--seconds"):
        profile_script_command(["true"], out=tmp_path, seconds=-1.0)


LOOP = """\
import keras, tensorflow as tf
keras.utils.set_random_seed(1)
net = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, activation="relu"),
                        keras.layers.BatchNormalization(), keras.layers.Dropout(0.5),
                        keras.layers.Dense(1)])
optimizer, calls = keras.optimizers.Adam(), tf.Variable(0)
mean = keras.metrics.Mean()
batches = tf.data.Dataset.range(900).map(lambda n: tf.random.stateless_normal((16, 8), (n, 1)))

@tf.function
def train_step(x):
    calls.assign_add(1)
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((net(x, training=True) - tf.reduce_sum(x, 1, keepdims=True)) ** 2)
    gradients = tape.gradient(loss, net.trainable_variables)
    optimizer.apply_gradients(zip(gradients, net.trainable_variables))
    mean.update_state(loss)
    {extra}
    return loss

for x in batches:
    train_step(x)
print(calls.numpy(), optimizer.iterations.numpy(), mean.result().numpy().tobytes().hex())
print(*[tf.reduce_sum(tf.abs(v)).numpy().tobytes().hex() for v in net.variables
        if v.dtype == "float32"])
"""


HELD = """
import tensorflow as tf

weight = tf.Variable(1.0)

@tf.function
def step(x):
    with tf.GradientTape() as tape:
        loss = (weight - x) ** 2
    weight.assign_sub(0.01 * tape.gradient(loss, weight))

batches = iter(tf.data.Dataset.from_tensors(1.0).repeat(400))
for x in batches:
    step(x)
for _ in range(300):
    step(tf.constant(2.0))
"""

PLAIN = LOOP.replace("{extra}", "pass")
PRINTING = LOOP.replace("{extra}", "tf.print('step', output_stream='file://steps')")


@dataclass(frozen=True, kw_only=True)
class SeveralLoops:
    """A script of a loop, one whose step prints, and two whose steps one function does."""

    profile: ScriptProfile
    printed: str
    without_profile: str
    """What it printed when it was run without the profile."""

    steps: str
    """What the second loop's step printed."""


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> SeveralLoops:
    """The script, run both ways."""
    folder = tmp_path_factory.mktemp("loops")
    script = folder / "loops.py"
    script.write_text(PLAIN + PRINTING + HELD)
    plain = subprocess.run(
        [sys.executable, str(script)], cwd=folder, capture_output=True, text=True, check=True
    ).stdout
    (folder / "steps").unlink()
    profiled, printed = profile(folder, "sh", "-c", f"cd {folder} && {sys.executable} {script}")
    return SeveralLoops(
        profile=profiled,
        printed=printed,
        without_profile=plain,
        steps=(folder / "steps").read_text(),
    )


def test_a_loops_step_is_run_again_on_one_batch_and_nothing_is_changed_by_it(
    several: SeveralLoops,
) -> None:
    assert several.without_profile.startswith("900 900 ")
    assert several.printed == several.without_profile
    loop = several.profile.loops[0]
    assert len(loop.rounds) == 3
    assert several.profile.failures == ()
    step = several.profile.to_json()["loops"][0]["step"]
    assert step["busy_fraction"] > 0
    assert step["busy_not_measured"] == ""


def test_a_loops_step_that_does_more_is_not_run_again(several: SeveralLoops) -> None:
    assert several.printed.splitlines()[2].startswith("900 900 ")
    assert several.steps.count("step") == 900
    step = several.profile.to_json()["loops"][1]["step"]
    assert step["busy_fraction"] is None
    assert "PrintV2" in step["busy_not_measured"]


def test_each_loop_has_its_own_steps_though_one_function_does_them_all(
    several: SeveralLoops,
) -> None:
    above = (PLAIN + PRINTING).count("\n")
    steps = {(loop.kind, loop.place.line - above): loop.steps for loop in several.profile.loops[2:]}
    assert steps == {("dataset", 12): 400, ("calls", 16): 299}, "the last one has no end"


@pytest.mark.parametrize(
    "with_others", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["alone", "with others"]
)
def test_a_loop_inside_of_a_tf_function_has_u_where_its_dataset_is_an_argument(
    tmp_path: Path, with_others: bool
) -> None:
    """And not a bit of the training is another one: shuffling, Dropout and noise are drawn as before."""
    command = [sys.executable, str(SCRIPTS / "inner_loop.py"), *(["--all"] * with_others)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as plain:
        profiled, printed = profile(tmp_path, *command)
        plain_printed, _ = plain.communicate()

    assert printed == plain_printed
    # 6 epochs in one; of the others 3 in one, and 8 times 10 steps.
    assert printed.splitlines()[-1] == f"steps {6 * 94 + (3 * 94 + 80) * with_others}"
    assert profiled.failures == ()
    given, *others = profiled.to_json()["loops"]
    lines = (SCRIPTS / "inner_loop.py").read_text().splitlines()
    assert (given["steps"], given["steps_a_call"], given["batch_rows"]) == (6, 94, 16)
    assert len(given["rounds"]) == 3
    assert given["step"]["busy_fraction"] > 0
    assert sum(given["step"]["parts_s"].values()) == pytest.approx(given["step"]["step_s"])
    assert "one call contains many steps" in given["step"]["input_wait_not_measured"]
    # Its dataset's line is known, and what is missing there.
    [line] = {each.place.line for each in profiled.minor if each.kind == "sequential_map"}
    assert "from_tensor_slices" in lines[line - 1]
    if with_others:
        captured, taken = others
        assert captured["steps"] == 3
        assert "dataset is not an argument" in captured["step"]["busy_not_measured"]
        assert "reads its batches from an iterator itself" in taken["step"]["busy_not_measured"]
    assert all(loop["step"]["busy_fraction"] is None for loop in others)
