"""The loop, over settings whose speeds are known."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from tests.unit.tune.situations import CACHED, OWN_DATASET, PLAIN, changed

from stoker.tune.compare import Load
from stoker.tune.ledger import Ledger, decide, events, replay
from stoker.tune.levers import Situation
from stoker.tune.process import TrialFailed
from stoker.tune.profile import Profile, TrialFacts, Windows, profile_of
from stoker.tune.report import report
from stoker.tune.search import Limits, Tuned, search

BASE = changed(PLAIN, data=OWN_DATASET, passes_agree=True)

CACHE = "keep the dataset's first pass in memory"


@dataclass
class World:
    """A machine that is not noisy: what a sample costs, in ms, under settings."""

    input_ms: float = 3.0
    step_ms: float = 1.0
    python_ms: float = 0.1
    sending_ms: float = 0.0
    xla: float = 0.5
    bfloat16: float = 2.0
    bfloat16_shift: float = 0.0
    input_noise: float = 1.0
    """How much slower every second process is while the input is waited for."""

    hidden: bool = False
    """What the input costs, it takes from the step: no batch is waited for."""

    lucky: bool = False
    """One of three windows of a profile waits for nothing."""

    step_noise: float = 1.0
    """How much slower every second process is where the step is what takes the time."""

    profiles: int = 1_000
    """How many can be measured."""

    situation: Situation = BASE
    broken: Mapping[str, TrialFailed] | None = None
    """Setting -> what becomes of a process that has it, unless it has rematerialization too."""

    dies_at: tuple[int, ...] = ()
    """Windows of which the process, the first that was opened and each in its place, dies."""

    others: tuple[float, ...] = ()
    """Cores that others take while levers are measured, one after the other; later none."""

    held_up: float = 1.0
    """How much slower the unchanged experiment runs next to other processes."""

    watched: int = 0
    busy: bool = False
    calls: int = 0
    opened: int = 0
    closed: int = 0

    @contextmanager
    def watch(self, *pids: int) -> Iterator[Callable[[], Load]]:
        assert len(set(pids)) == 2
        others = self.others[self.watched] if self.watched < len(self.others) else 0.0
        self.watched += 1
        self.busy = others > 0
        yield lambda: Load(cores=2, others=others)
        self.busy = False

    def open(self, settings: Mapping[str, Any], left_s: float) -> Bench:
        del left_s
        for name, failed in (self.broken or {}).items():
            if name in settings and "train.remat" not in settings:
                raise failed
        self.opened += 1
        return Bench(self, dict(settings))


class Bench:
    def __init__(self, world: World, settings: dict[str, Any]) -> None:
        self.world, self.settings = world, settings
        self.is_usable, self.pid = True, world.opened
        self.is_slower = world.opened % 2 == 0
        is_cached = settings.get("data.pipeline.cache") == "memory"
        self.situation = changed(
            world.situation,
            data=CACHED if is_cached else None,
            precision=settings.get("train.precision", "float32"),
            xla=settings.get("train.xla", False),
            steps_per_call=settings.get("train.steps_per_call", 1),
            batch_size=settings.get("data.pipeline.batch_size", 32),
            accumulate=settings.get("train.accumulate", world.situation.resolved.accumulate),
            reduction_bytes_per_pack=settings.get("train.reduction_bytes_per_pack", 0),
        )

    @property
    def step_ms(self) -> float:
        return self.compute_ms + self.sending_ms

    @property
    def sending_ms(self) -> float:
        in_packs = self.settings.get("train.reduction_bytes_per_pack")
        return self.world.sending_ms / (4 if in_packs else 1)

    @property
    def compute_ms(self) -> float:
        step = self.world.step_ms
        step /= self.world.xla if self.settings.get("train.xla") else 1.0
        changed = self.settings.get("train.precision", "float32") != "float32"
        return step / (self.world.bfloat16 if changed else 1.0)

    @property
    def input_ms(self) -> float:
        at_once = 2 if self.settings.get("train.feed.threads", 0) > self.situation.cores else 1
        return 0.01 if self.situation.is_cached else self.world.input_ms / at_once

    @property
    def python_ms(self) -> float:
        return self.world.python_ms / self.situation.resolved.steps_per_call

    @property
    def real_ms(self) -> float:
        if self.settings.get("train.accumulate") == 1:
            return max(self.input_ms, 0.5 * (self.step_ms + self.python_ms))
        return max(self.input_ms, self.step_ms + self.python_ms)

    def speed(self) -> float:
        self.world.calls += 1
        if self.world.calls in self.world.dies_at:
            self.is_usable = False
            raise TrialFailed("crash", "ended by SIGKILL")
        waits = self.input_ms > self.step_ms + self.python_ms
        of_all = self.world.input_noise if waits else self.world.step_noise
        noise = of_all if self.is_slower else 1.0
        noise *= self.world.held_up if self.world.busy and not self.settings else 1.0
        return 1e3 / (self.real_ms * noise)

    def input_speed(self) -> float:
        return 1e3 / self.input_ms

    def profile(self) -> Profile:
        self.world.profiles -= 1
        if self.world.profiles < 0:
            raise TrialFailed("budget", "time is up")
        late = max(0.0, self.input_ms - self.step_ms - self.python_ms)
        wait = 0.0 if self.world.hidden else late
        as_always = [window(self.step_ms), window(self.real_ms, wait_ms=wait)]
        third = [window(self.step_ms)] * 2 if self.world.lucky else as_always
        sending_s = self.sending_ms / 1e3
        return profile_of(
            TrialFacts(rows_a_step=1.0, per_epoch=100, steps_per_call=1, communication_s=sending_s),
            Windows(
                turns=[as_always, as_always, third],
                called=[window(self.step_ms + self.python_ms)],
                taken=[window(self.input_ms)],
            ),
        )

    def curve(self, *, seed: int, steps: int, every: int) -> list[float]:
        changed = self.settings.get("train.precision", "float32") != "float32"
        shift = self.world.bfloat16_shift if changed else 0.0
        return [1.0 / (1 + at) + 0.01 * seed + shift for at in range(steps // every)]

    def close(self) -> None:
        self.world.closed += 1


def window(ms: float, *, wait_ms: float = 0.0) -> dict[str, Any]:
    return {
        "steps": 100,
        "rows": 100.0,
        "wall_s": ms / 10,
        "wait_s": wait_ms / 10,
        "cpu_s": ms / 10,
    }


def tuned(world: World, folder: Path, **limits: Any) -> Tuned:
    ledger = Ledger(folder / "ledger.jsonl")
    try:
        return search(
            world.open,
            ledger=ledger,
            limits=Limits(**limits),
            log=lambda line, left_s: None,
            watch=world.watch,
        )
    finally:
        ledger.close()


def decisions(found: Tuned) -> dict[str, str]:
    return {outcome.lever: outcome.decision for outcome in found.outcomes}


def test_a_gain_under_load_has_to_be_confirmed(tmp_path: Path) -> None:
    world = World(
        input_ms=0.1,
        python_ms=0.0,
        xla=1.0,
        bfloat16=1.0,
        situation=changed(BASE, passes_agree=False),
        others=(1.5,),
        held_up=2.0,
    )

    found = tuned(world, tmp_path)

    assert "kept" not in decisions(found).values()
    (event_of_noise,) = (
        event for event in events(tmp_path / "ledger.jsonl") if "disturbed" in event
    )
    assert decide(event_of_noise["disturbed"], threshold=1.05) == "kept"
    assert event_of_noise["decision"] == "reverted"
    assert event_of_noise["other_load"] == ""


def test_permanent_load_is_reported(tmp_path: Path) -> None:
    found = tuned(World(input_ms=0.1, others=(1.5,) * 100), tmp_path)

    kept = [outcome.why for outcome in found.outcomes if outcome.decision == "kept"]
    assert kept
    assert all("other processes used 1.5 of its 2 cores during the trial" in why for why in kept)


def test_a_lever_that_slows_training_is_called_slower(tmp_path: Path) -> None:
    found = tuned(World(input_ms=0.1, bfloat16=0.2), tmp_path)

    whys = {outcome.lever: outcome.why for outcome in found.outcomes}
    assert whys["precision mixed_bfloat16"].endswith(": slower")


def test_levers_of_the_input_come_before_those_of_the_step(tmp_path: Path) -> None:
    world = World()

    found = tuned(world, tmp_path)

    assert found.diagnosis_before.bottleneck == "input"
    assert found.settings == {
        "data.pipeline.cache": "memory",
        "train.steps_per_call": 10,
        "train.precision": "mixed_bfloat16",
    }
    assert next(iter(decisions(found))) == CACHE
    assert decisions(found)["XLA"] == "reverted"
    assert decisions(found)["50 steps per call"] == "reverted"
    assert found.after.samples_per_s > 5 * found.before.samples_per_s
    assert world.opened == world.closed


def test_the_noise_of_an_input_that_was_waited_for_hides_no_gain_of_the_step(
    tmp_path: Path,
) -> None:
    found = tuned(World(input_noise=1.4, bfloat16=1.2), tmp_path)

    assert decisions(found)[CACHE] == "kept"
    assert decisions(found)["precision mixed_bfloat16"] == "kept"
    assert found.noise.ratio == pytest.approx(1.0)
    noises = [event for event in events(tmp_path / "ledger.jsonl") if event["event"] == "noise"]
    assert [event["gain"]["ratio"] for event in noises[:1]] == pytest.approx([1 / 1.4])
    assert len(noises) > 1
    assert replay(tmp_path / "ledger.jsonl") == []


def test_a_dead_process_of_the_kept_settings_is_replaced(tmp_path: Path) -> None:
    plain = World()
    expected = tuned(plain, tmp_path / "plain")
    # The noise takes two windows a pair, and the lever's first window measures the kept settings.
    noise = next(e for e in events(tmp_path / "plain" / "ledger.jsonl") if e["event"] == "noise")
    first = 2 * len(noise["pairs"]) + 1
    dying = World(dies_at=(first,))

    found = tuned(dying, tmp_path / "dying")

    assert decisions(found) == decisions(expected)
    assert found.settings == expected.settings
    kinds = [event["event"] for event in events(tmp_path / "dying" / "ledger.jsonl")]
    assert kinds.count("replaced") == 1
    assert dying.opened == dying.closed


def test_a_lever_during_which_it_dies_again_has_failed(tmp_path: Path) -> None:
    plain = World()
    tuned(plain, tmp_path / "plain")
    noise = next(e for e in events(tmp_path / "plain" / "ledger.jsonl") if e["event"] == "noise")
    first = 2 * len(noise["pairs"]) + 1
    dying = World(dies_at=(first, first + 1))

    found = tuned(dying, tmp_path / "dying")

    assert "crash: ended by SIGKILL" in next(
        outcome.why for outcome in found.outcomes if outcome.decision == "failed"
    )
    assert [outcome.decision for outcome in found.outcomes].count("failed") == 1
    assert dying.opened == dying.closed


def test_a_noise_that_cannot_be_measured_again_costs_nothing_that_was_kept(tmp_path: Path) -> None:
    opened: list[Any] = []
    world = World()

    def open_once(settings: Mapping[str, Any], left_s: float) -> Bench:
        if settings and settings in opened:
            raise TrialFailed("memory", "a second one does not fit")
        opened.append(dict(settings))
        return world.open(settings, left_s)

    ledger = Ledger(tmp_path / "ledger.jsonl")
    found = search(
        open_once,
        ledger=ledger,
        limits=Limits(),
        log=lambda line, left_s: None,
        watch=World().watch,
    )
    ledger.close()

    assert decisions(found)[CACHE] == "kept"
    assert decisions(found)["precision mixed_bfloat16"] == "kept"
    assert world.opened == world.closed


def test_levers_of_the_step_are_skipped_while_the_input_is_the_bottleneck(tmp_path: Path) -> None:
    world = World(broken={"data.pipeline.cache": TrialFailed("memory", "it did not fit")})

    found = tuned(world, tmp_path)

    assert found.settings == {}
    assert decisions(found) == {
        CACHE: "failed",
        "10 steps per call": "skipped",
        "50 steps per call": "skipped",
        "precision mixed_bfloat16": "skipped",
        "XLA": "skipped",
        "4 times the batch": "skipped",
    }


def test_more_parallel_input_is_tried_only_if_a_core_is_idle(tmp_path: Path) -> None:
    waits = changed(PLAIN, made_here=True, prefetch=8, cpu_cores=8)

    idle = tuned(World(situation=waits), tmp_path / "idle")
    used_up = tuned(World(situation=changed(waits, cpu_cores=1)), tmp_path / "used-up")

    assert idle.settings["train.feed.threads"] == 16
    assert decisions(idle)["input on 4 threads"] == "reverted"
    assert decisions(used_up)["input on 2 threads"] == "skipped"
    (why,) = {each.why for each in used_up.outcomes if each.lever == "input on 2 threads"}
    assert why == "training uses 1.0 of 1 cores: no core is idle"
    # Its work stays what it is, so CPU time does not decide.
    (event,) = [
        each
        for each in events(tmp_path / "idle" / "ledger.jsonl")
        if each["event"] == "decision" and each["lever"] == "input on 16 threads"
    ]
    assert "input_pairs" not in event
    assert replay(tmp_path / "idle" / "ledger.jsonl") == []


def test_more_parallel_input_is_not_tried_if_training_does_not_wait(tmp_path: Path) -> None:
    waits = changed(PLAIN, made_here=True, prefetch=8, cpu_cores=8)

    found = tuned(World(situation=waits, hidden=True), tmp_path)

    assert found.diagnosis_before.bottleneck == "input"
    assert decisions(found)["input on 4 threads"] == "reverted"
    (why,) = {each.why for each in found.outcomes if each.lever == "input on 16 threads"}
    assert why == "training waits for batches only 0.0% of the time"


def test_one_lucky_window_does_not_hide_an_input_bottleneck(tmp_path: Path) -> None:
    found = tuned(World(lucky=True), tmp_path)

    assert found.before.busy_high >= 0.95
    assert found.diagnosis_before.bottleneck == "input"
    assert decisions(found)[CACHE] == "kept"


def test_where_noise_hides_whether_the_input_takes_from_the_step_its_cpu_time_decides(
    tmp_path: Path,
) -> None:
    hidden = changed(BASE, made_here=True, cpu_cores=8)
    unsure = World(input_ms=1.18, python_ms=0.0, hidden=True, lucky=True, situation=hidden)

    found = tuned(unsure, tmp_path)

    assert found.diagnosis_before.bottleneck == "none"
    assert found.before.busy_fraction < 0.95 <= found.before.busy_high
    assert decisions(found)[CACHE] == "kept"
    # What only samples a second could tell stays unknown.
    assert decisions(found)["input on 4 threads"] == "skipped"


def test_packs_are_tried_only_if_communication_is_the_bottleneck(
    tmp_path: Path,
) -> None:
    pair = changed(BASE, replicas=2, reduction_dtype="bfloat16")
    quick = World(input_ms=0.01, python_ms=0.01, xla=1.0, bfloat16=1.0, situation=pair)

    sends = tuned(replace(quick, sending_ms=1.0), tmp_path / "sends")
    computes = tuned(quick, tmp_path / "computes")

    assert sends.diagnosis_before.bottleneck == "communication"
    assert "train.reduction_bytes_per_pack" in sends.diagnosis_before.text
    assert sends.settings == {"train.reduction_bytes_per_pack": 32 << 20}
    assert decisions(sends)["gradients sent in 2 packs"] == "kept"
    assert decisions(computes)["gradients sent in 2 packs"] == "skipped"
    (why,) = {each.why for each in computes.outcomes if "packs" in each.lever}
    assert why == "communication is not the bottleneck"


@pytest.mark.parametrize("kind", ["crash", "hang", "memory", "refused"])
def test_a_lever_that_fails_is_a_result(tmp_path: Path, kind: Any) -> None:
    world = World(broken={"train.xla": TrialFailed(kind, "so it was")})

    found = tuned(world, tmp_path)

    (failed,) = (outcome for outcome in found.outcomes if outcome.lever == "XLA")
    assert (failed.decision, failed.why) == ("failed", f"{kind}: so it was")
    assert "train.precision" in found.settings
    assert world.opened == world.closed


def test_what_does_not_fit_in_memory_is_tried_with_rematerialization(tmp_path: Path) -> None:
    whole = "no accumulation: the whole batch in one pass"
    deep = changed(BASE, accumulate=2, blocks=("encoder",))
    world = World(
        input_ms=0.1,
        situation=deep,
        broken={"train.accumulate": TrialFailed("memory", "it did not fit")},
    )

    found = tuned(world, tmp_path)

    assert decisions(found)[whole] == "failed"
    assert decisions(found)[f"{whole}, with rematerialization"] == "kept"
    assert found.settings["train.remat"] == ["encoder"]
    assert "4 times the batch" in decisions(found)
    assert "4 times the batch, with rematerialization" not in decisions(found)

    fits = tuned(replace(world, broken=None, opened=0, closed=0), tmp_path / "fits")

    assert decisions(fits)[whole] == "kept"
    assert "train.remat" not in fits.settings


def test_a_data_service_is_proposed_for_an_input_that_uses_all_cores(tmp_path: Path) -> None:
    found = tuned(World(situation=PLAIN), tmp_path)

    (service,) = (o for o in found.outcomes if o.lever == "make batches on other machines")
    assert service.decision == "proposed"
    assert "not tried" in service.why
    assert found.settings == {}
    assert "make batches on other machines" in report(found, name="x", usd_per_hour=None)
    assert "make batches on other machines" not in decisions(
        tuned(World(situation=changed(PLAIN, cpu_cores=8)), tmp_path / "cores")
    )


def test_a_lever_with_another_loss_curve_is_only_proposed(tmp_path: Path) -> None:
    found = tuned(World(bfloat16_shift=0.5), tmp_path)

    (precision,) = (o for o in found.outcomes if o.lever.startswith("precision"))
    assert precision.decision == "proposed"
    assert precision.parity is not None
    assert not precision.parity.alike
    assert "train.precision" not in found.settings


def test_an_experiment_that_is_healthy_is_left_alone(tmp_path: Path) -> None:
    found = tuned(World(input_ms=0.5, python_ms=0.0, bfloat16=0.9), tmp_path)

    assert found.diagnosis_before.bottleneck == "none"
    assert found.settings == {}
    assert CACHE in {o.lever for o in found.outcomes if o.decision == "skipped"}
    assert found.before is found.after


def test_kept_settings_stay_when_the_budget_ends(tmp_path: Path) -> None:
    world = World(broken={"train.steps_per_call": TrialFailed("budget", "time is up")})

    found = tuned(world, tmp_path)

    assert found.settings == {"data.pipeline.cache": "memory"}
    assert "10 steps per call" in found.ended
    assert world.opened == world.closed


def test_a_lever_whose_result_was_not_measured_is_not_in_the_lock(tmp_path: Path) -> None:
    world = World(profiles=2)

    found = tuned(world, tmp_path)

    # The first lever's result was measured, the second's was not.
    assert found.settings == {"data.pipeline.cache": "memory"}
    assert found.after.samples_per_s == pytest.approx(1e3 / 1.1)
    assert decisions(found)[CACHE] == "kept"
    (taken_back,) = [o for o in found.outcomes if "its result was not measured" in o.why]
    assert taken_back.decision == "proposed"
    kinds = [event["event"] for event in events(tmp_path / "ledger.jsonl")]
    assert kinds.count("taken back") == 1
    assert not found.finished
    assert replay(tmp_path / "ledger.jsonl") == []
    assert world.opened == world.closed


def test_a_gain_inside_the_noise_is_not_kept(tmp_path: Path) -> None:
    """Two processes of the same settings differ by 1.4: then 1.2 says nothing, and 2.0 does."""
    of_noise = World(input_ms=0.01, xla=1.0, step_noise=1.4, python_ms=0.0)

    hidden = tuned(replace(of_noise, bfloat16=1.2), tmp_path / "hidden")
    clear = tuned(replace(of_noise, bfloat16=3.0), tmp_path / "clear")
    quiet = tuned(replace(of_noise, bfloat16=1.2, step_noise=1.0), tmp_path / "quiet")

    assert max(hidden.noise.ratio, 1 / hidden.noise.ratio) == pytest.approx(1.4)
    assert decisions(hidden)["precision mixed_bfloat16"] == "reverted"
    assert decisions(clear)["precision mixed_bfloat16"] == "kept"
    assert decisions(quiet)["precision mixed_bfloat16"] == "kept"


ALIKE = [(1.0, 1.0)] * 6
TWICE = [(1.0, 2.0)] * 6
SLOWER = [(1.0, 0.8)] * 6


@pytest.mark.parametrize(
    ("cpu", "speed", "decision"),
    [
        (TWICE, ALIKE, "kept"),
        (ALIKE, TWICE, "reverted"),
        (TWICE, SLOWER, "reverted"),
        (None, TWICE, "kept"),
        (None, ALIKE, "reverted"),
    ],
)
def test_cpu_time_decides_about_the_input_and_speed_about_the_step(
    cpu: Any, speed: Any, decision: str
) -> None:
    samples = {"pairs": speed} | ({} if cpu is None else {"input_pairs": cpu})

    assert decide(samples, threshold=1.05) == decision


def test_no_lever_is_tried_after_the_budget(tmp_path: Path) -> None:
    found = tuned(World(), tmp_path, budget_s=-1.0)

    assert found.settings == {}
    assert "budget" in found.ended


def test_an_experiment_that_cannot_be_measured_is_an_error(tmp_path: Path) -> None:
    def refuse(settings: Mapping[str, Any], left_s: float) -> Bench:
        raise TrialFailed("refused", "no model")

    ledger = Ledger(tmp_path / "ledger.jsonl")
    with pytest.raises(TrialFailed, match="no model"):
        search(
            refuse,
            ledger=ledger,
            limits=Limits(),
            log=lambda line, left_s: None,
            watch=World().watch,
        )
    ledger.close()


def test_every_decision_follows_from_the_samples_in_the_ledger(tmp_path: Path) -> None:
    found = tuned(World(bfloat16_shift=0.5), tmp_path)

    path = tmp_path / "ledger.jsonl"
    decided = [event for event in events(path) if event["event"] == "decision"]
    assert {event["lever"]: event["decision"] for event in decided} == decisions(found)
    assert replay(path) == []


def test_a_decision_that_does_not_follow_is_found(tmp_path: Path) -> None:
    tuned(World(), tmp_path)
    path = tmp_path / "ledger.jsonl"
    changed = path.read_text().replace('"decision": "reverted"', '"decision": "kept"', 1)
    path.write_text(changed)

    (wrong,) = replay(path)

    assert (wrong["decided"], wrong["follows"]) == ("kept", "reverted")


def test_a_ledger_that_was_cut_by_a_kill_is_read_up_to_there(tmp_path: Path) -> None:
    tuned(World(), tmp_path)
    path = tmp_path / "ledger.jsonl"
    whole = list(events(path))
    path.write_text(path.read_text()[:-20])

    assert list(events(path)) == whole[:-1]


def test_the_report_names_what_was_kept_and_what_was_not(tmp_path: Path) -> None:
    found = tuned(World(), tmp_path)

    page = report(found, name="<b>mine</b>", usd_per_hour=3.6)

    assert "&lt;b&gt;mine&lt;/b&gt;" in page
    assert "<b>mine" not in page
    for outcome in found.outcomes:
        assert outcome.lever.replace("'", "&#x27;") in page
    assert "USD" in page
    assert page.count("<svg") == 3


def test_what_was_found_is_json(tmp_path: Path) -> None:
    from stoker.app.tuning.tuning import as_json

    facts = json.loads(json.dumps(as_json(tuned(World(), tmp_path), usd_per_hour=3.6)))

    assert facts["after"]["usd_per_epoch"] == pytest.approx(facts["after"]["epoch_s"] / 1000)
    assert facts["diagnosis_before"]["bottleneck"] == "input"
