"""How jobs are found, and the errors if they are not."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from stoker.core.errors import ConfigError, UserError
from stoker.jobs import places
from stoker.jobs.job import Job, write_job
from stoker.jobs.overview import Here, list_jobs
from stoker.jobs.places import (
    Submitted,
    add_to_index,
    find_place,
    open_job,
    read_submitted,
    write_submitted,
)
from stoker.jobs.targets import Target, read_targets


def forget() -> None:
    places._found.clear()


def test_an_id_follows_from_what_is_submitted(job: Job) -> None:
    assert job.id == replace(job).id
    assert job.id != replace(job, command=("train",)).id
    assert open_job(write_job(job)) == job


@pytest.mark.parametrize("name", ["a/b", "", ".hidden", "a" * 101, "a\nb", "a b", "\u00e4"])
def test_a_name_that_is_not_one_of_a_folder_is_refused(job: Job, name: str) -> None:
    with pytest.raises(ConfigError, match="the name of a job must be"):
        replace(job, name=name)


def test_a_job_is_found_by_the_index_by_its_runs_and_by_the_beginning_of_its_id(job: Job) -> None:
    place = write_job(job)
    with pytest.raises(ConfigError, match="no job has this ID"):
        find_place(job.id)
    assert find_place(job.id, [job.runs]) == place
    forget()

    add_to_index(place)
    forget()

    assert find_place(job.id) == place
    assert find_place(job.id[:-2]) == place


def test_a_beginning_of_two_ids_names_both(job: Job) -> None:
    other = replace(job, command=("train",))
    write_job(job)
    write_job(other)

    with pytest.raises(ConfigError) as caught:
        find_place("small", [job.runs])

    assert job.id in caught.value.line()
    assert other.id in caught.value.line()


def test_a_beginning_of_many_ids_names_five(job: Job) -> None:
    ids = sorted(write_job(replace(job, command=(f"{i}",))).name for i in range(8))

    with pytest.raises(ConfigError) as caught:
        find_place("small", [job.runs])

    assert f"{', '.join(ids[:5])} and 3 more. " in caught.value.line()


def test_an_unknown_job_names_the_nearest(job: Job) -> None:
    write_job(job)
    wrong = job.id[:-1] + ("0" if job.id[-1] != "0" else "1")

    with pytest.raises(
        ConfigError, match=f"no job has this ID. Received: '{wrong}'. Did you mean '{job.id}'"
    ):
        find_place(wrong, [job.runs])


@pytest.mark.parametrize("named", ["a/b", "../x", "a" * 200, "a\nb", "", "-x", "*"])
def test_a_hostile_id_is_one_line(named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        find_place(named)

    assert "\n" not in caught.value.line()
    assert "a job is named by its ID" in caught.value.line()


@pytest.fixture
def targets(tmp_path: Path) -> dict[str, Target]:
    return read_targets({}, file=tmp_path / "stoker.yaml")


@pytest.fixture
def of_another_user(job: Job, home: Path) -> Iterator[Job]:
    """A job whose folder only its owner can enter, in a folder of runs that all can read."""
    with tempfile.TemporaryDirectory(dir="/tmp") as runs:
        os.chmod(runs, 0o755)
        other = replace(job, runs=Path(runs))
        write_job(other).chmod(0o700)
        if os.geteuid() == 0:  # root can enter every folder, so it becomes somebody else
            os.seteuid(65534)
            yield other
            os.seteuid(0)
        else:
            other.place.chmod(0)
            yield other
            other.place.chmod(0o700)


def test_a_job_of_another_user_is_one_line_and_does_not_hide_others(
    targets: dict[str, Target], of_another_user: Job
) -> None:
    place = find_place(of_another_user.id, [of_another_user.runs])

    with pytest.raises(UserError) as caught:
        open_job(place)

    assert "must be a file that can be read" in caught.value.line()
    assert "another user's" in caught.value.line()
    listed, problems = list_jobs(Here(targets=targets, runs=(of_another_user.runs,)))
    assert [each.state.id for each in listed] == [of_another_user.id]
    assert "another user's" in listed[0].state.reason
    assert problems == []


def test_a_damaged_job_is_one_line(job: Job) -> None:
    place = write_job(job)
    (place / "job.json").write_text("{")

    with pytest.raises(UserError, match="Submit the experiment again"):
        open_job(place)


def test_what_a_provider_noted_of_a_submission_stays(job: Job) -> None:
    place = write_job(job)
    assert read_submitted(place) is None
    (place / "submitted.json").write_text('{"cluster": "c1"}')
    assert read_submitted(place) is None
    submitted = Submitted(target="local", scheduler_id="7", submitted_s=1.0)

    write_submitted(place, submitted)

    assert read_submitted(place) == submitted
    assert '"c1"' in (place / "submitted.json").read_text()
