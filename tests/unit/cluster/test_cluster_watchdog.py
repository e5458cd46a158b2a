"""Who hangs is decided from what was heard when; the clock is an argument."""

from __future__ import annotations

from stoker.cluster.launch.member import Beat, Phase, read_beat
from stoker.cluster.launch.watchdog import PATIENCE, START_SILENT_S, Watchdog

LIMIT_S = 20.0


def beat(rank: int, phase: Phase, step: int) -> Beat:
    return Beat(rank=rank, phase=phase, step=step, at_s=0.0)


def watch(*phases: Phase) -> Watchdog:
    """Workers that began at 0 and have said at 1 what they are at; those that train have stepped."""
    watchdog = Watchdog(LIMIT_S)
    for rank, phase in enumerate(phases):
        watchdog.began(rank, now_s=0.0)
        if phase != "start":
            watchdog.heard(beat(rank, phase, 7), now_s=1.0)
    return watchdog


def test_a_beat_is_read_as_it_was_sent() -> None:
    sent = Beat(rank=3, phase="save", step=9, at_s=1.5, line="epoch 1 \u2713\n", share=0.25)

    assert read_beat(sent.to_message()) == sent


def test_a_worker_that_steps_is_let_be() -> None:
    watchdog = watch("train")

    for second in range(2, 200, 10):
        assert watchdog.hang(second) is None
        watchdog.heard(beat(0, "train", second), now_s=second)


def test_silence_names_the_silent_one_though_all_wait_for_it() -> None:
    watchdog = watch("train", "train", "train")
    for second in range(2, 24):
        watchdog.heard(beat(0, "train", 7), now_s=second)
        watchdog.heard(beat(2, "train", 7), now_s=second)

    hang = watchdog.hang(23.0)

    assert hang is not None
    assert hang.ranks == (1,)
    assert hang.why == "no heartbeat for 22 s"


def test_no_step_names_those_that_are_furthest_behind() -> None:
    watchdog = watch("train", "train")
    for second in range(2, 24):
        watchdog.heard(beat(0, "train", 8), now_s=second)
        watchdog.heard(beat(1, "train", 7), now_s=second)

    hang = watchdog.hang(23.5)

    assert hang is not None
    assert (hang.ranks, hang.why) == ((1,), "at step 7, phase train, for 22 s")


def test_a_worker_stopped_between_two_steps_is_not_taken_for_a_slow_one() -> None:
    watchdog = watch("train", "train")
    for second in range(2, 21):
        watchdog.heard(beat(0, "train", 7), now_s=second)
        watchdog.heard(beat(1, "train", 7), now_s=second)
    for second in range(21, 25):
        watchdog.heard(beat(0, "train", 7), now_s=second)
        assert watchdog.hang(second + 0.5) is None, "its next beat may yet come"

    watchdog.heard(beat(0, "train", 7), now_s=25.0)
    hang = watchdog.hang(25.5)

    assert hang is not None
    assert (hang.ranks, hang.why) == ((1,), "no heartbeat for 6 s")


def test_start_validation_and_saving_have_longer_but_not_forever() -> None:
    phases: tuple[Phase, ...] = ("start", "validate", "save")
    for phase in phases:
        watchdog = watch(phase)
        for second in range(2, 3 * int(LIMIT_S)):
            watchdog.heard(beat(0, phase, 7), now_s=second)
            assert watchdog.hang(second) is None
        late_s = PATIENCE * LIMIT_S + 3
        watchdog.heard(beat(0, phase, 7), now_s=late_s)
        assert watchdog.hang(late_s) is not None


def test_the_first_step_may_take_long_for_it_is_traced_and_compiled() -> None:
    watchdog = Watchdog(LIMIT_S)
    watchdog.began(0, now_s=0.0)
    for second in range(1, 60):
        watchdog.heard(beat(0, "train", 0), now_s=second)
        assert watchdog.hang(second) is None


def test_a_worker_that_is_silent_while_it_starts_is_given_a_minute() -> None:
    watchdog = watch("start", "start")

    assert watchdog.hang(START_SILENT_S - 1) is None
    hang = watchdog.hang(START_SILENT_S + 1)

    assert hang is not None
    assert hang.ranks == (0, 1)


def test_who_only_serves_needs_no_steps_but_must_live() -> None:
    watchdog = watch("serve")
    for second in range(2, 600):
        watchdog.heard(beat(0, "serve", 0), now_s=second)
    assert watchdog.hang(600) is None
    assert watchdog.all_done()
    assert watchdog.hang(600 + LIMIT_S) is not None


def test_who_is_done_waits_in_peace_until_all_are() -> None:
    watchdog = watch("done", "train")

    assert not watchdog.all_done()
    assert watchdog.is_done(0)
    watchdog.ended(1)
    assert watchdog.all_done()
    assert watchdog.hang(1000.0) is None


def test_a_pause_of_the_launcher_itself_is_on_nobodys_account() -> None:
    watchdog = watch("train")

    watchdog.forgive(600.0)

    assert watchdog.hang(610.0) is None
    assert watchdog.silent(602.0) == ()


def test_a_worker_that_was_started_again_has_a_new_limit() -> None:
    watchdog = watch("serve")
    watchdog.began(0, now_s=100.0)

    assert watchdog.hang(100.0 + LIMIT_S) is None
