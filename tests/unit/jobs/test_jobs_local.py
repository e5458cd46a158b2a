"""This machine as a target: what its record means, what it refuses, and when all workers start again."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stoker.cluster.launch.group import Failure, Outcome
from stoker.cluster.limits import usable_cores
from stoker.cluster.processes.identity import ProcessIdentity, identity_of
from stoker.core.errors import ConfigError, UserError
from stoker.jobs.job import Job, Resources, write_job
from stoker.jobs.places import Submitted, add_to_index, write_submitted
from stoker.jobs.provider import Phase
from stoker.jobs.providers.local.hang import hang_is_noticed, newest_progress_s
from stoker.jobs.providers.local.provider import LocalProvider
from stoker.jobs.providers.local.record import STOP, LocalRecord, read_record, write_record
from stoker.jobs.providers.local.room import why_fewer
from stoker.jobs.providers.local.settings import LocalSettings
from stoker.jobs.providers.local.supervisor import Supervisor
from stoker.jobs.providers.local.workers import next_incarnation, own_environment, worker_commands


@pytest.fixture
def provider() -> LocalProvider:
    return LocalProvider("local", LocalSettings())


def record(identity: ProcessIdentity | None = None, *, phase: Phase = Phase.RUNNING) -> LocalRecord:
    mine = identity or identity_of(os.getpid())
    return LocalRecord(supervisor=mine, phase=phase, submitted_s=time.time())


def place_of(job: Job, written: LocalRecord) -> Path:
    place = write_job(job)
    write_record(place, written)
    write_submitted(place, Submitted(target="local", scheduler_id="1", submitted_s=1.0))
    add_to_index(place)
    return place


def test_a_record_is_read_as_it_was_written(job: Job) -> None:
    written = record()

    assert read_record(place_of(job, written)) == written


@pytest.mark.parametrize(
    ("change", "phase", "said"),
    [
        ({}, Phase.RUNNING, ""),
        ({"boot": "another start of this machine"}, Phase.FAILED, "submit it again to go on"),
        ({"began": "1"}, Phase.FAILED, "was killed, or the machine restarted"),
        ({"host": "elsewhere"}, Phase.UNKNOWN, "it was submitted on elsewhere"),
    ],
)
def test_a_job_whose_supervisor_has_gone_has_failed_and_one_elsewhere_is_unknown(
    job: Job, provider: LocalProvider, change: dict[str, Any], phase: Phase, said: str
) -> None:
    place_of(job, record(replace(identity_of(os.getpid()), **change)))

    state = provider.state(job.id)

    assert state.phase is phase
    assert said in state.reason
    assert provider.jobs() == [state]


def test_a_job_that_is_over_stays_as_it_ended_although_its_supervisor_has_gone(
    job: Job, provider: LocalProvider
) -> None:
    gone = replace(identity_of(os.getpid()), boot="earlier")
    place_of(job, record(gone, phase=Phase.DONE))

    provider.stop(job.id)

    assert provider.state(job.id).phase is Phase.DONE


def test_a_job_that_was_never_started_is_unknown(job: Job, provider: LocalProvider) -> None:
    add_to_index(write_job(job))

    assert provider.state(job.id).phase is Phase.UNKNOWN
    assert provider.jobs() == []


def test_a_job_of_another_machine_is_not_stopped_here(job: Job, provider: LocalProvider) -> None:
    place = place_of(job, record(replace(identity_of(os.getpid()), host="elsewhere")))

    # Its state is not known here, so this must not end it.
    with pytest.raises(UserError, match="it runs on elsewhere"):
        provider.stop(job.id)

    assert not (place / STOP).exists()


def test_what_this_machine_does_not_have_is_refused(
    job: Job, provider: LocalProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    for needs, said in (
        (Resources(workers=0), "--workers must be from 1 to 1024"),
        (Resources(workers=2, gpus=9000), "2 workers with 9000 each"),
        (Resources(gpus=-1), "--gpus must be 0 or more"),
    ):
        with pytest.raises(ConfigError, match=said):
            provider.validate(replace(job, resources=needs))
    with pytest.raises(ConfigError, match="Set it: export WANDB_API_KEY="):
        provider.validate(replace(job, secrets=("WANDB_API_KEY",)))
    monkeypatch.setenv("WANDB_API_KEY", "x")

    provider.validate(replace(job, secrets=("WANDB_API_KEY",), resources=Resources(workers=2)))


def test_workers_get_their_rank_and_no_place_in_another_group(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_PROCID", "5")
    monkeypatch.setenv("TF_CONFIG", "{}")
    monkeypatch.setenv("STOKER_HEARTBEAT_FD", "7")
    smaller = replace(job, resources=Resources(workers=2), environment={"NCCL_DEBUG": "INFO"})

    commands = worker_commands(smaller, smaller.place, incarnation=3)

    for rank, command in enumerate(commands):
        environ = command.environ
        assert (environ["STOKER_RANK"], environ["STOKER_TASKS"]) == (str(rank), "2")
        assert command.argv[-4:] == ("job-task", str(smaller.place), "--incarnation", "3")
        assert not {"SLURM_PROCID", "TF_CONFIG", "STOKER_HEARTBEAT_FD"} & environ.keys()
        assert environ["NCCL_DEBUG"] == "INFO"
        assert environ["CUDA_VISIBLE_DEVICES"] == "-1"
    assert own_environment({"SLURM_TMPDIR": "/x", "PATH": "/bin"}) == {"PATH": "/bin"}


def test_an_elastic_job_starts_with_as_many_workers_as_this_machine_has_room_for(
    job: Job, provider: LocalProvider
) -> None:
    cores = usable_cores()

    def tasks(**needs: Any) -> int:
        commands = worker_commands(
            replace(job, resources=Resources(**needs)), job.place, incarnation=1
        )
        assert {each.environ["STOKER_TASKS"] for each in commands} == {str(len(commands))}
        return len(commands)

    assert tasks(workers=6, min_workers=1, cpus=max(1, cores // 2)) == min(cores, 2)
    assert tasks(workers=6, min_workers=1, cpus=cores) == 1
    assert tasks(workers=1024, min_workers=512) == 512, "no room, but none was demanded"
    assert tasks(workers=cores + 1) == cores + 1, "not elastic"
    small = Resources(workers=1, min_workers=1)
    assert why_fewer(small) == ""
    assert why_fewer(replace(small, workers=2, cpus=cores)).startswith("1 of 2 workers, as this")
    large = replace(job, resources=Resources(workers=6, min_workers=2, cpus=cores))
    with pytest.raises(ConfigError, match=f"--cpus must be small .* 2 workers with {cores} each"):
        provider.validate(large)


def test_a_start_without_a_number_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the number of its next start"):
        next_incarnation(tmp_path / "no job")


def failed(code: int | None) -> Outcome:
    failure = Failure(rank=1, name="worker 1", reason="was killed", code=code, tail=("oh no", " "))
    return Outcome(failure=failure, signaled=False, preempted=False, began=True, step=3)


def ended_by_signal(*, preempted: bool) -> Outcome:
    return Outcome(failure=None, signaled=True, preempted=preempted, began=True, step=3)


@pytest.fixture
def supervisor(job: Job) -> Supervisor:
    (write_job(job) / "logs").mkdir()
    return Supervisor(job.place, LocalSettings(max_restarts=2, grace_s=1.0))


def test_failures_start_all_again_up_to_the_limit(job: Job, supervisor: Supervisor) -> None:
    ends = [supervisor._end_of(failed(-signal.SIGKILL)) for _ in range(3)]

    assert ends[:2] == [None, None]
    assert ends[2] is not None
    assert ends[2][0] is Phase.FAILED
    assert "worker 1 was killed: oh no" in ends[2][1]
    assert "2 more" not in (log := (job.place / "logs" / "supervisor.log").read_text())
    assert "1 more times at most" in log


@pytest.mark.parametrize("code", [2, 3])
def test_an_error_of_the_user_is_not_tried_again(supervisor: Supervisor, code: int) -> None:
    assert supervisor._end_of(failed(code)) == (Phase.FAILED, "worker 1 was killed: oh no")


def test_the_cause_of_an_end_decides_whether_a_job_was_stopped_starts_again_or_failed(
    job: Job, supervisor: Supervisor
) -> None:
    done = Outcome(failure=None, signaled=False, preempted=False, began=True, step=3)
    assert supervisor._end_of(done) == (Phase.DONE, "")
    assert supervisor._end_of(ended_by_signal(preempted=False)) == (Phase.DONE, "")

    by_machine = supervisor._end_of(ended_by_signal(preempted=True))
    assert by_machine is not None
    assert by_machine[0] is Phase.FAILED

    supervisor._hang_s, supervisor._hung = 60.0, True
    hangs = [supervisor._end_of(ended_by_signal(preempted=True)) for _ in range(3)]
    assert hangs[:2] == [None, None]
    assert hangs[2] == (Phase.FAILED, "no progress for 60 s (after 0 restarts)")
    supervisor._hung = False

    supervisor._timed_out = True
    assert supervisor._end_of(ended_by_signal(preempted=True)) is None

    (job.place / STOP).touch()
    assert supervisor._end_of(ended_by_signal(preempted=True)) == (Phase.STOPPED, "")


@pytest.mark.parametrize("name", ["logs/task-1.log", "run of it/train/metrics.jsonl", "run of it"])
def test_a_job_hangs_if_neither_a_log_nor_the_run_gets_anything(
    job: Job, name: str, tmp_path: Path
) -> None:
    place = write_job(job)
    (place / "run").write_text(str(place / "run of it"))
    (place / "run of it" / "train").mkdir(parents=True)
    (place / "run of it" / "train" / "metrics.jsonl").touch()
    (place / "logs").mkdir()
    (place / "logs" / "task-1.log").touch()
    for path in place.rglob("*"):
        os.utime(path, (1.0, 1.0))
    assert newest_progress_s(place) == 1.0
    hangs = threading.Event()
    with hang_is_noticed(place, 0.2, hangs.set):
        assert hangs.wait(60)

    hangs.clear()
    later_s = time.time() + 1000
    path = place / name / "new" if name == "run of it" else place / name
    path.touch()
    os.utime(path, (later_s, later_s))
    with hang_is_noticed(place, 0.2, hangs.set), hang_is_noticed(place, 0, hangs.set):
        assert not hangs.wait(0.5)
