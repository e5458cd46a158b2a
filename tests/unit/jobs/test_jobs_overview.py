"""Whose logs are printed: those in the job's folder, or what a target whose machines share no folder still has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from stoker.core.errors import UserError
from stoker.jobs import overview
from stoker.jobs.job import Job, write_job
from stoker.jobs.overview import KnownJob, events_of, lines_of, lines_of_place
from stoker.jobs.places import Submitted, write_submitted
from stoker.jobs.provider import JobEvent, JobState, Phase, Provider
from stoker.jobs.targets import Target


@dataclass
class Cluster:
    """A target on other machines: it answers, or its server restarts, in this order."""

    answers: list[Phase | None] = field(default_factory=list)

    def validate(self, job: Job) -> None: ...

    def describe(self, job: Job, code: bytes) -> str:
        return f"{job.id} {len(code)}"

    def submit(self, job: Job) -> str:
        return job.id

    def state(self, job_id: str) -> JobState:
        phase = self.answers.pop(0)
        if phase is None:
            raise UserError("the cluster's API must answer")
        return JobState(id=job_id, scheduler_id="", phase=phase)

    def jobs(self) -> Sequence[JobState]:
        return []

    def stop(self, job_id: str) -> None: ...

    def events(self, job_id: str) -> Sequence[JobEvent]:
        return [JobEvent(at_s=1.0, about=job_id, reason="Created", message="created")]

    def log_lines(self, job_id: str, *, worker: int | None, follow: bool) -> Iterator[str]:
        yield f"from the pods of {job_id}, {worker}, {follow}"


@dataclass(frozen=True, kw_only=True)
class Here(Target):
    """The target whose provider is this one."""

    provider_here: Cluster

    def open(self) -> Provider:
        return self.provider_here


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    monkeypatch.setattr(overview, "LOOK_S", 0.01)
    monkeypatch.setattr(overview, "SHARED_S", 0.05)
    return Cluster()


@pytest.fixture
def known(job: Job, cluster: Cluster) -> KnownJob:
    place = write_job(job)
    write_submitted(place, Submitted(target="far", scheduler_id="x", submitted_s=1.0))
    target = Here(name="far", provider="far", settings=None, provider_here=cluster)
    state = JobState(id=job.id, scheduler_id="x", phase=Phase.RUNNING)
    return KnownJob(place=place, job=job, target=target, state=state)


def targets(known: KnownJob) -> dict[str, Target]:
    assert known.target is not None
    return {"far": known.target}


def write_log(place: Path) -> None:
    (place / "logs").mkdir()
    (place / "logs" / "task-0.log").write_text("from the folder\n")


def test_logs_come_from_the_folder_as_soon_as_it_has_them(known: KnownJob) -> None:
    found = list(lines_of_place(known.place, targets(known), worker=None))
    assert found == [f"from the pods of {known.job.id}, None, False"]
    write_log(known.place)
    assert list(lines_of_place(known.place, targets(known), worker=0)) == ["from the folder"]


def test_following_waits_for_the_folder_and_then_takes_the_pods(
    known: KnownJob, cluster: Cluster
) -> None:
    cluster.answers = [Phase.WAITING, None, *[Phase.RUNNING] * 100]
    found = list(lines_of(known, targets(known), worker=1))
    assert found == [f"from the pods of {known.job.id}, 1, True"]
    assert len(cluster.answers) < 99, "it waited for machines, through a restart of the server"


def test_following_the_folder_survives_a_server_that_restarts(
    known: KnownJob, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_log(known.place)
    cluster.answers = [None, Phase.RUNNING, None, Phase.DONE]
    assert list(lines_of(known, targets(known), worker=0)) == ["from the folder"]

    monkeypatch.setattr(overview, "SILENT_S", 0.0)
    cluster.answers = [None] * 100
    with pytest.raises(UserError, match="must answer"):
        list(lines_of(known, targets(known), worker=0))


def test_only_a_target_that_tells_events_has_some(known: KnownJob) -> None:
    assert [event.reason for event in events_of(known)] == ["Created"]
    alone = KnownJob(place=known.place, job=known.job, target=None, state=known.state)
    assert events_of(alone) == ()
