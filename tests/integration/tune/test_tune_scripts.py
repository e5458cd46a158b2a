"""Scripts of the kind in tutorials, each profiled once: the findings, and their lines."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from stoker.scriptprofile import ScriptProfile, profile_script
from stoker.scriptprofile.loops import OwnLoop
from stoker.scriptprofile.rules.wall_rules import filling_s

SCRIPTS = Path(__file__).resolve().parent / "scripts"

NAMES = ("mnist_fit", "image_generator", "custom_loop", "retraced", "no_autotune", "fed_by_python")
"""Scripts that differ most in how they train and in what holds them up."""

SOAK = (
    "eager_loop", "looks_first", "mixed_float16", "mirrored_outside_scope", "xla_eager",
    "whole_scans", "first_pass", "own_first_pass", "outside_steps",
)  # fmt: skip
"""Scripts of `make soak` alone."""


COUNTED = ("mnist_fit", "custom_loop")
"""Those whose operations are counted, and the device's peak measured: it takes a process each."""

IF_SLOW = ("small_batch", "steps_per_execution")
"""Said of the smallest scripts where the machine is so slow that a few steps can be measured."""


@dataclass(frozen=True, kw_only=True)
class Ran:
    """One script under the profile."""

    script: Path
    profile: ScriptProfile
    printed: str

    def line(self, text: str) -> int:
        """Number of the only line that holds this text."""
        [number] = [
            number
            for number, line in enumerate(self.script.read_text().splitlines(), start=1)
            if text in line
        ]
        return number

    def said(self, kind: str) -> str:
        """What the only finding of this kind saw."""
        [finding] = [each for each in self.profile.findings if each.kind == kind]
        return finding.observation

    def found(self) -> dict[str, int]:
        """Finding -> its line; all of them lie in the script.

        Left out is that a step waits, and no rule knows why: that depends on the machine.
        """
        assert {finding.place.file for finding in self.profile.findings} <= {str(self.script)}
        found = {finding.kind: finding.place.line for finding in self.profile.findings}
        return {kind: line for kind, line in found.items() if kind != "input_bound"}


@pytest.fixture(scope="module")
def ran(in_soak: bool, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Ran]:
    """Every script, two at a time; without those of `SOAK` unless a selected test needs them."""
    names = (*NAMES, *SOAK) if in_soak else NAMES

    def run(name: str) -> Ran:
        folder = tmp_path_factory.mktemp(name)
        script = SCRIPTS / f"{name}.py"
        with (folder / "printed").open("w+") as stream:
            profile = profile_script(
                [sys.executable, str(script)],
                folder=folder,
                stdout=stream.fileno(),
                mfu=name in COUNTED,
            )
            stream.seek(0)
            return Ran(script=script, profile=profile, printed=stream.read())

    tmp_path_factory.getbasetemp()  # two threads would make it at once
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(names, pool.map(run, names), strict=True))


@pytest.mark.parametrize(
    "name", [*NAMES, *(pytest.param(name, marks=pytest.mark.soak) for name in SOAK)]
)
def test_it_ends_well_and_the_watcher_too(ran: Mapping[str, Ran], name: str) -> None:
    profile = ran[name].profile
    # TensorFlow alone takes some 100 MiB, and no script of these a GiB and more.
    assert 2**27 < profile.peak_memory_bytes < 2**33

    assert profile.exit_code == 0
    assert profile.failures == ()
    assert profile.tensorflow == "2.21.0"
    assert profile.note() == ""


def test_a_healthy_fit_is_measured_and_left_alone(ran: Mapping[str, Ran]) -> None:
    [loop] = ran["mnist_fit"].profile.loops

    assert loop.rounds, "the step was run on a resident batch; test_tune_commands compares the bits"
    assert ran["mnist_fit"].found() == {}


def test_images_one_by_one_out_of_a_generator(ran: Mapping[str, Ran]) -> None:
    script = ran["image_generator"]
    [loop] = script.profile.loops
    facts = script.profile.to_json()["loops"][0]

    source = script.line("Dataset.from_generator(")
    assert script.found() == {"generator_rows": source, "float64_data": source}
    assert (loop.kind, loop.place.line) == ("fit", script.line("model.fit("))
    assert (loop.steps, loop.rows) == (96, 8)
    assert 0 < facts["step"]["busy_fraction"] < 1
    dearest = max(facts["stages"], key=lambda stage: stage["share"])
    assert (dearest["name"], dearest["line"]) == ("Generator", source)


def test_a_loop_of_ones_own(ran: Mapping[str, Ran]) -> None:
    script = ran["custom_loop"]
    [loop] = script.profile.loops

    assert script.found() == {
        "sequential_map": script.line("train_dataset.map(augment)"),
        "host_sync": script.line("total += float(loss_value)"),
    }
    assert (loop.kind, loop.steps, loop.passes, loop.rows) == ("dataset", 192, 3, 64)
    assert loop.place.line == script.line("in enumerate(train_dataset)")
    assert script.printed.splitlines() == [f"epoch {epoch}: 64 steps" for epoch in range(3)]


@pytest.mark.soak
def test_an_eager_loop(ran: Mapping[str, Ran]) -> None:
    script = ran["eager_loop"]

    assert script.found()["eager_loop"] == script.line("def train_step"), "where @tf.function goes"
    assert set(script.found()) <= {"eager_loop", "sequential_map"}


def test_a_dataset_without_prefetch_is_reported_even_if_it_costs_little(
    ran: Mapping[str, Ran],
) -> None:
    """Whether its step waits depends on the machine: it is a finding, or said to be worth little."""
    script = ran["custom_loop"]
    minor = {each.kind: each for each in script.profile.minor}

    assert minor["small_batch"].place.line == script.line("shuffle(256).batch(64)")
    assert "batches of 64" in minor["small_batch"].observation
    assert minor["missing_prefetch"].place.line == script.line("shuffle(256).batch(64)")
    assert (
        "TensorFlow itself prepares batches ahead (Prefetch"
        in minor["missing_prefetch"].observation
    )


@pytest.mark.soak
def test_an_eager_loop_without_prefetch_is_reported_even_if_it_costs_little(
    ran: Mapping[str, Ran],
) -> None:
    eager = ran["eager_loop"]
    minor = {each.kind: each for each in eager.profile.minor}
    if "missing_prefetch" not in eager.found():
        assert minor["missing_prefetch"].place.line == eager.line(").batch(20)")
        assert "little here" in minor["missing_prefetch"].observation


def test_a_step_that_is_traced_again_and_again(ran: Mapping[str, Ran]) -> None:
    script = ran["retraced"]
    [finding] = [each for each in script.profile.findings if each.kind == "retracing"]

    # As Python has it, a function begins at its decorator.
    assert script.found() == {"retracing": script.line("@tf.function")}
    assert "traced 40 times in 40 calls" in finding.observation
    assert "its argument step was the Python value 0, 1, 2" in finding.observation
    assert "step=tf.constant(step)" in finding.change


@pytest.mark.soak
def test_a_look_at_the_data_is_not_training_and_the_same_work_in_each_epoch_is_a_finding(
    ran: Mapping[str, Ran],
) -> None:
    script = ran["looks_first"]

    assert [loop.kind for loop in script.profile.loops] == ["fit"]
    assert script.found() == {"uncached": script.line("dataset.map(slow")}


def test_batches_that_python_makes_and_a_model_that_cannot_be_called(
    ran: Mapping[str, Ran],
) -> None:
    script = ran["fed_by_python"]
    fit, calls = script.profile.loops

    assert script.found()["python_feed"] == script.line("def __getitem__")
    assert "the PyDataset Pictures (workers=1)" in script.said("python_feed")
    assert "waits" in script.said("python_feed")
    assert script.found()["train_on_batch"] == script.line("net.train_on_batch(")
    assert set(script.found()) <= {"python_feed", "train_on_batch", *IF_SLOW}
    assert (fit.kind, fit.steps, calls.kind) == ("fit", 80, "calls")
    assert fit.model["devices"] == ("CPU:0",), "it has its own train_step, and no call"


@pytest.mark.soak
def test_an_output_that_stays_in_float16(ran: Mapping[str, Ran]) -> None:
    script = ran["mixed_float16"]

    assert script.found()["half_output"] == script.line('activation="softmax"')
    assert set(script.found()) <= {"half_output", *IF_SLOW}
    # On a GPU the second one's 4 units would be a finding.
    [loop] = script.profile.loops
    kernels = [(each["sides"], each["place"][1]) for each in loop.model["kernels"]]
    assert kernels == [
        ((16, 16), script.line('activation="relu"')),
        ((16, 4), script.line('activation="softmax"')),
    ]
    assert loop.model["devices"] == ("CPU:0",)


@pytest.mark.soak
def test_xla_that_an_eager_step_leaves_out(ran: Mapping[str, Ran]) -> None:
    script = ran["xla_eager"]

    assert script.found() == {
        "xla_not_used": script.line("model.compile("),
        "eager_loop": script.line("run_eagerly=True"),
    }
    assert "it runs eagerly" in script.said("xla_not_used")


@pytest.mark.soak
def test_a_model_outside_of_its_strategy(ran: Mapping[str, Ran]) -> None:
    script = ran["mirrored_outside_scope"]

    assert script.found()["outside_scope"] == script.line("model = keras.Sequential")
    assert set(script.found()) <= {"outside_scope", *IF_SLOW}
    made = script.line("MirroredStrategy(")
    assert f"mirrored_outside_scope.py:{made}" in script.said("outside_scope")


def test_python_for_each_element_and_nothing_that_runs_ahead(ran: Mapping[str, Ran]) -> None:
    script = ran["no_autotune"]
    [loop] = script.profile.loops

    assert loop.nodes == (), "without autotune TensorFlow keeps no figures"
    assert script.found() == {
        "python_map": script.line("dataset.map(load_one)"),
        "missing_prefetch": script.line("dataset.batch(8)"),
    }
    assert "tf.py_function" in script.said("python_map")
    # What the map reads (`.numpy()`) in a thread of TensorFlow's, the loop does not read.
    assert isinstance(loop, OwnLoop)
    assert loop.syncs == ()


@pytest.mark.soak
def test_a_callback_that_holds_each_step_up_and_a_buffer_of_whole_scans(
    ran: Mapping[str, Ran],
) -> None:
    script = ran["whole_scans"]

    assert script.found() == {
        "slow_callback": script.line("def on_train_batch_end"),
        "shuffle_memory": script.line("scans.shuffle("),
    }
    said = script.said("slow_callback")
    assert "on_train_batch_end of the callback TellsTheTeam takes" in said
    assert "100,000 elements of 16,000,004 bytes" in script.said("shuffle_memory")


@pytest.mark.soak
def test_a_first_pass_that_fills_a_cache_is_the_largest_part_and_named_at_its_map(
    ran: Mapping[str, Ran],
) -> None:
    script = ran["first_pass"]
    [finding] = [each for each in script.profile.findings if each.kind == "slow_first_pass"]

    assert finding.place.line == script.line("dataset.map(slow)")
    assert "in the first of 3 passes" in finding.observation
    assert finding.gain is not None
    assert finding.gain[1] > 1.05
    assert "the first pass, which fills a cache" in dict(script.profile.time_parts)


@pytest.mark.soak
def test_a_first_pass_of_ones_own_loop_is_named_at_its_map_and_one_that_traces_is_not(
    ran: Mapping[str, Ran],
) -> None:
    script = ran["own_first_pass"]
    [finding] = [each for each in script.profile.findings if each.kind == "slow_first_pass"]
    fills, reads = script.profile.loops

    assert finding.place.line == script.line("dataset.map(slow)")
    assert finding.sure in ("measured", "possible"), "possible where the machine is busy"
    assert "in the first of 3 passes" in finding.observation
    assert "keeps the results on disk" in finding.change
    assert "the first pass, which fills a cache" in dict(script.profile.time_parts)
    assert fills.place.line == script.line("for batch in dataset")
    assert (fills.passes, fills.steps) == (3, 90)
    assert fills.measured_steps <= 60, "steps that wait for the cache to be filled are not measured"
    assert reads.first_pass is not None
    assert filling_s(fills) > 2
    assert filling_s(reads) == 0, "its first pass traces for long, and the cache was full"


@pytest.mark.soak
def test_time_outside_of_steps_is_named_by_its_line_and_steps_get_no_advice(
    ran: Mapping[str, Ran],
) -> None:
    script = ran["outside_steps"]
    parts = dict(script.profile.time_parts)

    assert script.found() == {
        "slow_predict": script.line("self.model.predict("),
        "slow_validation": script.line("model.fit("),
    }
    assert "in 60 calls" in script.said("slow_predict")
    assert parts["predict"] + parts["validation"] > parts["training"]
    assert all(each.gain is not None and each.gain[1] > 1.05 for each in script.profile.findings)


@pytest.mark.soak
def test_a_finding_names_the_line_where_the_user_wrote_what_is_to_be_changed(
    ran: Mapping[str, Ran],
) -> None:
    script = ran["first_pass"]
    findings = [*script.profile.findings, *script.profile.minor]
    lines = {(each.kind, each.place.line) for each in findings}

    assert script.found()["float64_data"] == script.line("x = x / 255.0")
    assert {line for kind, line in lines if kind == "small_batch"} == {script.line("BATCH = 4")}
    own = script.profile.loops[1]
    assert (own.kind, own.model["distributed"]) == ("dataset", False), "fit had the dataset before"


def test_a_timeline_is_kept_of_every_training_line(ran: Mapping[str, Ran]) -> None:
    for each in ran.values():
        for loop in each.profile.loops:
            assert len(loop.timeline) >= 2
            assert list(loop.timeline) == sorted(loop.timeline)


def test_a_fit_is_counted_for_the_batch_that_it_was_fed(ran: Mapping[str, Ran]) -> None:
    [facts] = ran["mnist_fit"].profile.to_json()["loops"]

    first, second = 26 * 26 * 32 * 2 * 9 * 1, 24 * 24 * 32 * 2 * 9 * 32
    dense = 2 * (12 * 12 * 32) * 10
    # Of the first layer only the weights' gradient is needed.
    assert facts["flops_a_step"] == 128 * (2 * first + 3 * second + 3 * dense)
    assert facts["peak_of"] == "convolutions and products of matrices in float32"
    assert min(facts["peak_flops_per_s"], facts["achieved_flops_per_s"]) > 0
    assert facts["mfu"] == pytest.approx(facts["achieved_flops_per_s"] / facts["peak_flops_per_s"])
    [(name, figure), *_] = ran["mnist_fit"].profile.machine()
    assert name == f"MFU in mnist_fit.py:{ran['mnist_fit'].line('model.fit(')}"
    assert "GFLOP/s" in figure


def test_a_loop_of_ones_own_too(ran: Mapping[str, Ran]) -> None:
    [facts] = ran["custom_loop"].profile.to_json()["loops"]

    assert facts["flops_a_step"] == 64 * (2 * 2 * 64 * 32 + 3 * 2 * 32 * 10)
    assert facts["peak_of"] == "products of matrices in float32"
    assert facts["mfu"] > 0


def test_nothing_is_counted_if_u_was_not_measured_or_mfu_is_off(
    ran: Mapping[str, Ran],
) -> None:
    for name in ran.keys() - set(COUNTED):
        for facts in ran[name].profile.to_json()["loops"]:
            assert facts["mfu"] is None
