"""A rollout's state under kills, a full disk, flipped bits and many operators: the same stage and counts."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from tests.loopback import Service, service
from tests.unit.rollout.cluster import Cluster
from tests.unit.rollout.state_kills import (
    SERVER,
    append,
    control,
    count,
    counts_of,
    go_back,
    latest,
    promote,
    template,
)

from stoker.core.errors import DataError, UserError
from stoker.rollout.control.controller import Controller
from stoker.rollout.counts.counts import read_counts, write_counts
from stoker.rollout.state.changes import advance
from stoker.rollout.state.files import StateFiles
from stoker.rollout.state.settings import RolloutSettings
from stoker.rollout.state.state import Phase, RolloutState
from stoker.rollout.state.user_gates import UserGate

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    template(tmp_path / "state")
    return tmp_path / "state"


def test_a_writer_killed_at_each_system_call_leaves_the_state_and_counts_of_before_or_after(
    tmp_path: Path,
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.rollout.state_kills", str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    kills = json.loads(done.stdout)
    assert len(kills) == 8
    assert min(kills.values()) >= 8, kills


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with two versions of the model taxi."""
    from tests.unit.rollout.test_rollout_operations import saved_model

    from stoker.registry.repository import Repository

    for noise in "ab":
        Repository(tmp_path / "m").push(saved_model(tmp_path / noise, noise=noise), "taxi")
    return tmp_path / "m"


def fill(disk: Path) -> Path:
    """Take all room of a disk; removing the file gives it back."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            for size in (1 << 16, 1 << 10, 1):
                while file.write(b"x" * size) == size:
                    pass
        except OSError:
            pass
    return ballast


def test_a_full_disk_advances_no_stage_and_changes_no_count(small_disk: Path) -> None:
    folder = small_disk / "state"
    template(folder)
    before = latest(folder)
    ballast = fill(small_disk)

    with pytest.raises(UserError, match=r"must have room for it.*bytes free"):
        promote(folder)
    with pytest.raises(OSError, match="must have room"):
        count(folder)
    assert latest(folder) == before
    assert read_counts(folder, rollout=1) == counts_of(1_000)
    assert not list(folder.rglob("*.tmp"))

    ballast.unlink()
    count(folder)
    promote(folder)
    assert latest(folder)[0] == before[0] + 1
    assert read_counts(folder, rollout=1) == counts_of(2_000)


def test_on_a_full_disk_an_operator_rolls_back(small_disk: Path) -> None:
    template(small_disk / "state")
    fill(small_disk)
    go_back(small_disk / "state")
    assert latest(small_disk / "state")[1].phase is Phase.ROLLED_BACK


def test_once_a_full_disk_has_room_again_the_next_rollback_is_possible_too(
    small_disk: Path,
) -> None:
    template(small_disk / "state")
    for _ in range(2):
        ballast = fill(small_disk)
        go_back(small_disk / "state")
        ballast.unlink()
        append(small_disk / "state", lambda now: replace(now, phase=Phase.RUNNING))
        assert (small_disk / "state" / ".reserve").stat().st_size == 16 << 10


def test_on_a_full_disk_the_controller_rolls_back_before_its_sign_of_life_fails(
    small_disk: Path,
) -> None:
    folder = small_disk / "state"
    template(folder)
    controller = Controller(folder, clock=lambda: 0.0, now=lambda: 1.0)
    controller.step()
    count(folder)
    fill(small_disk)
    with pytest.raises(UserError, match=r"beat\.json must have room"):
        controller.step()
    assert latest(folder)[1].phase is Phase.ROLLED_BACK


def test_on_a_full_disk_a_gate_of_the_user_rolls_back_and_its_message_is_sent_once(
    small_disk: Path,
) -> None:
    cluster = Cluster(folder=small_disk / "m" / ".rollout")
    answer = b'{"status": "success", "data": {"resultType": "scalar", "result": [0, "1"]}}'
    with service() as heard, service(body=answer) as prometheus:
        gate = UserGate(name="mine", prometheus=prometheus.url, query="1", max=0.0)
        unmeasured = ("slow_p99", "slow_p50")
        cluster.start(RolloutSettings(user_gates=(gate,), notify=(heard.url,), dry_run=unmeasured))
        controller = cluster.controller()
        for _ in range(2):  # the lease, the first stage
            controller.step()
        fill(small_disk)
        texts: list[str] = []
        end_s = time.monotonic() + 30.0
        while time.monotonic() < end_s:
            with contextlib.suppress(UserError):  # the sign of life
                controller.step()
            time.sleep(0.02)  # the calls are made in other threads
            if not texts and (texts := _rolled_back(heard)):
                end_s = time.monotonic() + 0.5

        assert cluster.state().phase is Phase.ROLLED_BACK
        assert len(_rolled_back(heard)) == 1


def _rolled_back(heard: Service) -> list[str]:
    texts = [each["text"] for each in heard.contents()]
    return [text for text in texts if "Now rolled back" in text]


def test_a_folder_without_write_permission_is_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = latest(folder)
    shutil.rmtree(folder / "counts")
    shutil.move(folder, folder.parent / "kept")
    folder.parent.joinpath("state").write_text("a file in the way")
    with pytest.raises(UserError, match="must be a folder that can be written"):
        StateFiles(folder).append({"share": 1}, after=None)
    folder.unlink()
    shutil.move(folder.parent / "kept", folder)
    assert latest(folder) == before


def flipped(raw: bytes) -> list[bytes]:
    """The content with one bit flipped, at each place."""
    return [
        raw[:at] + bytes([raw[at] ^ (1 << bit)]) + raw[at + 1 :]
        for at in range(len(raw))
        for bit in (at % 8,)
    ]


def test_a_flipped_bit_of_a_state_is_an_error_and_never_another_state(folder: Path) -> None:
    number, state = latest(folder)
    path, running = folder / f"{number:08}.json", StateFiles(folder)
    assert running.latest() is not None
    whole, damaged = path.read_bytes(), 0
    for raw in flipped(whole):
        path.write_bytes(raw)
        found: object = None
        with contextlib.suppress(DataError):
            found = latest(folder)
        assert found in (None, (number, state))
        damaged += found is None
    assert damaged > len(whole) / 2
    # A process that has read it goes on, and the next change repairs the state for all.
    held = running.latest()
    assert held is not None
    assert held.number == number
    running.append(held.content, after=held)
    assert latest(folder) == (number + 1, state)


def test_a_state_that_was_deleted_as_the_error_advises_is_given_up_by_a_process_that_had_read_it(
    folder: Path,
) -> None:
    running = StateFiles(folder)
    promote(folder)
    before = running.latest()
    assert before is not None
    (folder / f"{before.number:08}.json").unlink()

    back = running.latest()
    assert back is not None
    assert back.number == before.number - 1
    append(folder, lambda now: now)
    again = running.latest()
    assert again is not None
    assert again.number == before.number
    assert again.content != before.content

    shutil.move(folder, folder.parent / "gone")
    with pytest.raises(FileNotFoundError, match="state is gone"):
        running.latest()
    shutil.move(folder.parent / "gone", folder)
    assert running.latest() == again


def test_a_flipped_bit_of_counts_leaves_that_file_out_and_says_so_once(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_counts(folder, counts_of(500), {}, rollout=1, server="two")
    both = read_counts(folder, rollout=1)
    path = folder / "counts" / "1" / f"{SERVER}.json"
    whole = path.read_bytes()
    with caplog.at_level(logging.ERROR):
        for raw in flipped(whole):
            path.write_bytes(raw)
            assert read_counts(folder, rollout=1) in (both, counts_of(500))
    assert len(caplog.records) == 1
    assert "its counts are left out" in caplog.text
    path.write_bytes(whole)
    assert read_counts(folder, rollout=1) == both


def test_a_damaged_beat_changes_nothing(folder: Path) -> None:
    write_counts(folder, {}, {}, rollout=1, server=SERVER)
    controller = Controller(folder, clock=lambda: 0.0, now=lambda: 1.0)
    other = Controller(folder, clock=lambda: 0.0, now=lambda: 1.0)
    controller.step()
    before = latest(folder)
    beat = folder / "beat.json"
    for raw in [*flipped(beat.read_bytes()), b"", b"[]", b"\xff", b"null"]:
        beat.write_bytes(raw)
        other.step()
    controller.step()
    assert latest(folder) == before
    assert json.loads(beat.read_bytes())["lease"] == before[1].lease


@pytest.mark.parametrize(
    "name", ["99999999.json.bak", "²²²²²²²².json", "9.json", "00000009.json~", ".x.tmp", "nul\n"]
)
def test_files_of_others_in_the_folder_are_left_alone(folder: Path, name: str) -> None:
    before = latest(folder)
    (folder / name).write_text("{}")

    assert latest(folder) == before
    promote(folder)
    assert latest(folder)[0] == before[0] + 1
    assert (folder / name).read_text() == "{}"


RACE = """
import json, os, sys
from pathlib import Path
from stoker.core.errors import UserError
from stoker.rollout.operations import ModelRollouts
from stoker.rollout.state.changes import advance
from stoker.rollout.state.settings import RolloutSettings
import stoker.rollout.signatures

root = Path(sys.argv[1])
settings = RolloutSettings(stages=",".join(str(each) for each in range(1, 101)))


def step(now):
    return advance(now, now_s=1.0)


OPERATIONS = {
    "start": lambda rollouts: rollouts.start(2, settings, why=""),
    "promote": lambda rollouts: rollouts.apply(step, what="promote", why=""),
    "rollback": lambda rollouts: rollouts.roll_back(to=None, why=""),
}


def said(what):
    try:
        OPERATIONS[what](ModelRollouts(root, "taxi"))
    except UserError as error:
        return error.line()
    except BaseException as error:
        return repr(error)
    return "done"


def race(what):
    begin, go = os.pipe()
    reader, writer = os.pipe()
    children = []
    for _ in range(50):
        if not (pid := os.fork()):
            os.close(go)
            os.read(begin, 1)
            os.write(writer, (said(what) + chr(10)).encode())
            os._exit(0)
        children.append(pid)
    os.close(go)
    for pid in children:
        os.waitpid(pid, 0)
    os.close(writer)
    numbers = sorted(path.name for path in (root / "taxi" / ".rollout").glob("[!.]*.json"))
    with os.fdopen(reader) as found:
        return found.read().splitlines(), len(numbers)


print(json.dumps({what: race(what) for what in OPERATIONS}))
"""


def test_of_fifty_operators_at_once_each_sees_what_the_others_did(
    root: Path,
) -> None:
    done = subprocess.run([sys.executable, "-c", RACE, str(root)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    races: dict[str, tuple[list[str], int]] = json.loads(done.stdout)
    made = {what: lines.count("done") for what, (lines, _) in races.items()}
    refusals = {
        "start": "Only one rollout or A/B test of a model can run at a time",
        "promote": "promote must be decided again, because another change came first",
        "rollback": "A rollout can be rolled back only once",
    }
    for what, (lines, states) in races.items():
        others = [line for line in lines if line != "done"]
        assert len(lines) == 50
        assert all(refusals[what] in line for line in others), others
        assert states == sum(list(made.values())[: list(races).index(what) + 1])
    assert (made["start"], made["rollback"]) == (1, 1)
    number, state = latest(root / "taxi" / ".rollout")
    # The first promotion begins the first stage, and each further one went one stage.
    assert (number, state.stage) == (made["promote"] + 2, made["promote"] - 1)
    assert state.phase is Phase.ROLLED_BACK


def test_a_promotion_is_not_repeated_on_what_another_operator_left(
    root: Path,
) -> None:
    from stoker.rollout.operations import ModelRollouts
    from stoker.rollout.state.changes import resume
    from stoker.rollout.state.settings import RolloutSettings

    folder = root / "taxi" / ".rollout"
    rollouts = ModelRollouts(root, "taxi")
    rollouts.start(2, RolloutSettings(stages="pause,10,pause,100"), why="")
    promote(folder)

    def slowly(state: RolloutState) -> RolloutState:
        following = resume(state, now_s=1.0)
        if state.stage == 0:
            append(folder, lambda now: advance(now, now_s=1.0))  # another operator is faster
        return following

    with pytest.raises(UserError, match=r"another change came first.*change by me: version 2 run"):
        rollouts.apply(slowly, what="resume", why="")
    assert latest(folder)[1].stage == 1


def test_going_back_to_a_version_that_was_deleted_is_refused_before_anything_changes(
    root: Path,
) -> None:
    from stoker.rollout.operations import ModelRollouts
    from stoker.rollout.state.changes import promote_fully
    from stoker.rollout.state.settings import RolloutSettings

    rollouts = ModelRollouts(root, "taxi")
    rollouts.start(2, RolloutSettings(), why="")
    rollouts.apply(lambda now: promote_fully(now, now_s=1.0), what="promote", why="")
    shutil.rmtree(root / "taxi" / "1")
    before = latest(root / "taxi" / ".rollout")

    with pytest.raises(UserError, match=r"must have a version 1.*versions 2"):
        rollouts.roll_back(to=None, why="")
    assert latest(root / "taxi" / ".rollout") == before


@pytest.mark.parametrize("name", ["../taxi", "/etc", "", ".rollout", "a/b", "a\nb", "x" * 300])
def test_a_hostile_model_name_is_refused(name: str, root: Path) -> None:
    from stoker.rollout.operations import ModelRollouts

    before = sorted(os.walk(root.parent))
    with pytest.raises(UserError, match="must be one plain folder name"):
        ModelRollouts(root, name)
    assert sorted(os.walk(root.parent)) == before


def test_a_container_user_without_a_name_is_named_by_number(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stoker.rollout.operations import operator

    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 4_242_424)
    assert operator().startswith("4242424@")
    control(folder)
