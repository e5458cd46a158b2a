"""Jobs on a real Slurm: no number is lost or written twice, whatever ends their workers."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.integration.jobs.conftest import Counting, comments
from tests.lost_answers import write_losing_sbatch
from tests.slurm_cluster import wait_until

from stoker.core.errors import ConfigError, UserError
from stoker.jobs.job import Job
from stoker.jobs.logs import job_lines
from stoker.jobs.places import Submitted, write_submitted
from stoker.jobs.provider import JobState, Phase
from stoker.jobs.providers.slurm.problems import AnswerLost

LOSSES = int(os.environ.get("STOKER_SUBMISSIONS", "10"))
END, LONG = 100, 800
"""Numbers that a worker counts, 20 a second at most. Slurm looks at time limits every 30 s, and takes a while to
give up a machine, so two jobs count longer."""

COUNTS = {
    "requeue": 300,
    "term": 300,
    "preempted": 300,
    "limit": LONG,
    "lost": LONG,
    "stopped": 100_000,
    "cancelled": 100_000,
}
OVER = (Phase.DONE, Phase.FAILED, Phase.STOPPED)


@dataclass
class Disturbed:
    """Jobs whose workers are ended in the middle, all at the same time."""

    counting: Counting
    jobs: dict[str, Job]

    def over(self, name: str) -> tuple[Job, JobState]:
        """One of them when it is over, and its state then."""
        return self.jobs[name], self.counting.wait(self.jobs[name], *OVER, timeout_s=120)


@pytest.fixture(scope="module", autouse=True)
def disturbed(counting: Counting) -> Disturbed:
    """Submit jobs, and end their workers each in another way; the first tests run meanwhile."""
    wanted: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
        "requeue": ((), {}),
        "term": ((), {}),
        "limit": ((), {"settings": {"grace_s": 58}, "resources": {"time_limit_s": 60}}),
        "preempted": (
            (),
            {"settings": {"partition": "spot", "nodes": 1}, "resources": {"gpus": 1}},
        ),
        "lost": ((), {"settings": {"partition": "frail"}, "resources": {"workers": 1}}),
        "fails": (("fail", "30", "1", "2"), {}),
        "hopeless": (("fail", "3", "1", "9"), {"settings": {"max_restarts": 1}}),
        "mistake": (("fail", "3", "2", "9"), {}),
        "setup": ((), {"settings": {"setup": ("false || end 2 'no scratch disk'",)}}),
        "module": ((), {"settings": {"modules": ("cuda/12.5",)}}),
        "stopped": ((), {}),
        "cancelled": ((), {}),
    }
    jobs = {"early": submit_ended_in_login(counting), "dead": submit_ended_before(counting)}
    jobs |= {
        name: counting.submit(name, str(COUNTS.get(name, END)), *command, **more)
        for name, (command, more) in wanted.items()
    }
    number = {name: counting.state(job).scheduler_id for name, job in jobs.items()}
    for name in ("requeue", "term", "preempted", "lost", "stopped", "cancelled"):
        counting.wait_for_number(jobs[name], 5)
    counting.cluster.run("scontrol", "requeue", number["requeue"])
    counting.cluster.run("scancel", "--batch", "--signal=TERM", number["term"])
    # The processes of the machine's jobs live on without its slurmd.
    counting.cluster.daemons["slurmd-n4"].send(signal.SIGKILL)
    counting.cluster.run("scancel", number["cancelled"])
    urgent = ["--partition=urgent", "--exclusive", f"--output={counting.runs}/urgent.log"]
    counting.cluster.run("sbatch", "--wrap=sleep 1", *urgent)
    counting.provider().stop(jobs["stopped"].id)
    return Disturbed(counting, jobs)


def submit_ended_in_login(counting: Counting) -> Job:
    """Submit a job whose first start gets TERM while its login reads the profile."""
    home = counting.runs / "home"
    home.mkdir()
    (home / ".bash_profile").write_text('[ -n "$SLURM_RESTART_COUNT" ] || kill -TERM $$\n')
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(home))
        return counting.submit("early", str(END))


def submit_ended_before(counting: Counting) -> Job:
    """Submit a job whose script gets TERM before bash has read its first line."""
    file = counting.runs.parent / "before"  # bash expands its path
    file.write_text("kill -TERM $$\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BASH_ENV", str(file))
        return counting.submit("dead", str(END), secrets=("BASH_ENV",))


def test_a_job_says_why_it_waits_and_a_waiting_job_can_be_stopped(counting: Counting) -> None:
    gpus = {"resources": {"workers": 2, "gpus": 2, "time_limit_s": 120}}
    first = counting.submit("first", "100000", **gpus)
    counting.wait(first, Phase.RUNNING)
    second = counting.submit("second", "5", **gpus)

    words = "waits until enough machines are free (Resources)"
    wait_until(lambda: counting.state(second).reason == words, words)
    wait_until(lambda: counting.state(second).expected_start_s is not None, "expected start")
    state = counting.state(second)
    assert state.phase is Phase.WAITING
    assert state.expected_start_s is not None
    assert counting.state(first).started_s is not None
    assert state.expected_start_s > (counting.state(first).started_s or 0)

    counting.provider().stop(second.id)
    assert counting.state(second).phase is Phase.STOPPED
    assert counting.numbers(second, 0) == []
    counting.provider().stop(first.id)
    assert counting.state(first).phase is Phase.STOPPED
    # Submitted again, it goes on from where it was saved.
    reached = len(counting.numbers(first, 0))
    again = counting.provider().submit(first)
    assert again != counting.state(second).scheduler_id
    counting.wait_for_number(first, reached + 3)
    assert counting.state(first).phase is Phase.RUNNING
    counting.provider().stop(first.id)


def test_an_elastic_job_starts_on_as_many_nodes_as_there_are(counting: Counting) -> None:
    """Of one to four workers; the partition has two machines."""
    job = counting.submit("elastic", "5", resources={"workers": 4, "min_workers": 1})

    assert counting.wait(job, *OVER, timeout_s=300).phase is Phase.DONE
    assert [len(counting.numbers(job, rank)) for rank in range(4)] == [5, 5, 0, 0]


def test_secrets_reach_the_workers_and_stand_in_no_file(
    counting: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN_OF_TEST", "hunter2-canary")
    job = counting.submit("secret", "3", "needs", "TOKEN_OF_TEST", secrets=("TOKEN_OF_TEST",))
    absent = ("TOKEN_OF_TEST", "NOT_SET_ANYWHERE")
    sets = {"setup": ("true",)}  # which may set it, so only the job knows
    without = counting.submit("without", "3", secrets=absent, settings=sets)
    with pytest.raises(ConfigError, match=r"^secrets must be .* Received: no NOT_SET_ANYWHERE\."):
        counting.submit("refused", "3", secrets=absent)

    assert counting.wait(job, *OVER).phase is Phase.DONE
    assert "[worker 1] TOKEN_OF_TEST has 14 characters" in "\n".join(
        job_lines(job.place, worker=None, until=None)
    )
    files = [path for path in counting.runs.rglob("*") if path.is_file()]
    assert len(files) > 5
    assert [path for path in files if b"hunter2-canary" in path.read_bytes()] == []
    state = counting.wait(without, *OVER)
    assert state.phase is Phase.FAILED
    assert state.reason.startswith("secret NOT_SET_ANYWHERE is not in the job's environment")


@pytest.mark.parametrize(
    ("settings", "resources", "words"),
    [
        ({"partition": "mian"}, {}, ["partition must exist", "'mian'", "main"]),
        ({}, {"gpus": 3}, ["at most the 2 GPUs of a machine in partition main", "3"]),
        ({"nodes": 1}, {"gpus": 2}, ["at most the 2 GPUs", "4"]),
        ({}, {"workers": 3}, ["at most the 2 machines", "3"]),
        ({}, {"cpus": 17}, ["at most the 16 cores"]),
        ({}, {"memory_gib": 5.0}, ["at most the 3.90625 GiB"]),
        ({}, {"time_limit_s": 7200.0}, ["at most 3600 s, the limit of partition main", "7200 s"]),
        ({"nodes": 2}, {"workers": 3}, ["multiple of the target's nodes (2)"]),
        ({"sbatch": ["--constraint=infiniband"]}, {}, ["sbatch", "nvalid feature"]),
        ({"gpu_type": "a100"}, {"gpus": 1}, ["must have what the job requests", "gpu_type"]),
        ({"account": "nobody", "sbatch": ["--qos=x", "--begin=yesterdayish"]}, {}, ["sbatch"]),
    ],
)
def test_what_the_cluster_cannot_run_is_one_line_and_submits_nothing(
    counting: Counting, settings: dict[str, object], resources: dict[str, object], words: list[str]
) -> None:
    job = counting.job("impossible", "3", resources=resources)
    before = sorted(comments(counting.cluster))  # the order is that of states

    with pytest.raises(UserError) as caught:
        counting.provider(**settings).validate(job)

    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)
    assert sorted(comments(counting.cluster)) == before
    assert not (job.place / "submitted.json").exists()


def test_a_cluster_that_does_not_answer_is_one_line(
    counting: Counting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = counting.submit("reached", "3")
    conf = (counting.cluster.folder / "slurm.conf").read_text()
    port = next(line for line in conf.splitlines() if line.startswith("SlurmctldPort="))
    with socket.create_server(("127.0.0.1", 0)) as silent, monkeypatch.context() as patch:
        for number in (1, silent.getsockname()[1]):
            text = conf.replace(port, f"SlurmctldPort={number}\nMessageTimeout=2")
            (tmp_path / "slurm.conf").write_text(text)
            patch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
            with pytest.raises(UserError, match=r"^Slurm's controller must answer\. Received: .*"):
                counting.state(job)
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(tmp_path))
        with pytest.raises(UserError, match=r"on a login node"):
            counting.state(job)
    assert counting.wait(job, *OVER).phase is Phase.DONE


def test_a_job_of_slurm_that_only_has_its_number_is_left_alone(counting: Counting) -> None:
    """A controller that has lost its state begins again at 1."""
    options = ("--parsable", "--hold", "--output=/dev/null", "--wrap=true")
    other = counting.cluster.run("sbatch", *options).strip()
    job = counting.job("renumbered", "3")
    write_submitted(job.place, Submitted(target="test", scheduler_id=other, submitted_s=1.0))

    assert counting.state(job).phase is Phase.UNKNOWN
    (listed,) = [each for each in counting.provider().jobs() if each.id == job.id]
    assert listed.phase is Phase.UNKNOWN
    counting.provider().stop(job.id)

    state = ("squeue", "--noheader", f"--jobs={other}", "--format=%T")
    assert counting.cluster.run(*state).strip() == "PENDING"
    counting.cluster.run("scancel", other)


def submit_in_spite(counting: Counting, job: Job) -> str:
    """Submit as a person does: after an answer that was lost, the same command again."""
    provider = counting.provider(nodes=1, sbatch=("--hold",))  # nothing has to run
    for _ in range(3):
        with contextlib.suppress(AnswerLost):
            return provider.submit(job)
    raise AssertionError("three answers were lost")


def test_lost_answers_make_no_second_job_and_lose_none(
    counting: Counting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = shutil.which("sbatch")
    assert real is not None
    path = write_losing_sbatch(tmp_path / "bin", real, every=5 if LOSSES < 50 else 10)
    jobs = [counting.job(f"many-{number}", "2") for number in range(LOSSES)]
    with monkeypatch.context() as patch:
        patch.setenv("PATH", f"{path}:{os.environ['PATH']}")
        numbers = [submit_in_spite(counting, job) for job in jobs]
    # The process that submitted it was killed before it could note the number.
    (jobs[0].place / "submitted.json").unlink()
    assert counting.provider().submit(jobs[0]) == numbers[0]

    submitted = [each for each in comments(counting.cluster) if each.startswith("many-")]
    assert sorted(submitted) == sorted(job.id for job in jobs)
    assert len(set(numbers)) == LOSSES
    listed = {state.id for state in counting.provider().jobs()}
    assert listed >= {job.id for job in jobs}
    state = counting.state(jobs[-1])
    assert state.reason == f"is held by its user: scontrol release {numbers[-1]} (JobHeldUser)"
    counting.cluster.run("scancel", *numbers)


def test_a_start_whose_machine_was_lost_writes_nothing_more(disturbed: Disturbed) -> None:
    cluster = disturbed.counting.cluster
    down = ("sinfo", "--noheader", "--states=down", "--format=%N")
    wait_until(lambda: "n4" in cluster.run(*down), "loss of the machine")

    job, state = disturbed.over("lost")
    cluster.start_node("n4")

    assert (state.phase, state.restarts) == (Phase.DONE, 1)
    disturbed.counting.require_whole_count(job, LONG)
    assert (job.place / "overtaken-1-0").exists()


@pytest.mark.parametrize("name", ["early", "requeue", "term", "preempted", "fails", "limit"])
def test_the_count_of_a_job_that_starts_again_is_whole(disturbed: Disturbed, name: str) -> None:
    job, state = disturbed.over(name)

    assert state.phase is Phase.DONE, state
    assert state.restarts >= 1
    disturbed.counting.require_whole_count(job, COUNTS.get(name, END))


@pytest.mark.parametrize("name", ["requeue", "term", "preempted", "limit"])
def test_all_workers_save_before_they_are_killed(disturbed: Disturbed, name: str) -> None:
    """The second takes a second longer: the first one's end must not end it."""
    job, _ = disturbed.over(name)

    assert {"1-0", "1-1"} <= disturbed.counting.saved(job), disturbed.counting.log(job)


def test_a_signal_during_the_login_of_a_script_is_not_lost(disturbed: Disturbed) -> None:
    job, state = disturbed.over("early")

    assert state.restarts == 1
    assert "got TERM before the workers began" in disturbed.counting.log(job)


def test_a_signal_before_the_first_line_of_a_script_is_the_reason(disturbed: Disturbed) -> None:
    job, state = disturbed.over("dead")

    assert disturbed.counting.log(job) == "", "it had no first line"
    assert state.phase is Phase.FAILED
    assert state.reason.startswith("a signal ended its script, most likely before its first line")
    assert state.reason.endswith("submit it again: it goes on from its last checkpoint")


def test_only_a_preempted_start_waits_for_its_end(disturbed: Disturbed) -> None:
    """The others end at once: Slurm has decided already, or is not about to end them."""
    waits = {"requeue": False, "term": False, "cancelled": False, "limit": False, "preempted": True}
    for name, expected in waits.items():
        job, _ = disturbed.over(name)
        log = disturbed.counting.log(job)
        assert ("waits for its end by Slurm" in log) is expected, (name, log)


def test_gpu_seconds_of_a_preempted_job_are_those_of_both_starts(disturbed: Disturbed) -> None:
    cluster = disturbed.counting.cluster
    cluster.require_accounting()
    _, state = disturbed.over("preempted")
    fields = ("--noheader", "--parsable2", "--format=State,ElapsedRaw,AllocTRES")
    chosen = ("--duplicates", "--allocations", f"--jobs={state.scheduler_id}")

    def starts() -> list[list[str]]:
        return [line.split("|") for line in cluster.run("sacct", *chosen, *fields).splitlines()]

    wait_until(lambda: starts()[-1][0] == "COMPLETED", "the end in the accounting")

    seconds = [int(elapsed) for _, elapsed, _ in starts()]
    assert [name for name, *_ in starts()] == ["PREEMPTED", "COMPLETED"]
    assert all("gres/gpu=2" in tres.split(",") for *_, tres in starts())
    assert min(seconds) > 0
    known = disturbed.counting.provider().state(disturbed.jobs["preempted"].id)
    assert known.gpu_seconds == 2 * sum(seconds)


def test_only_failures_count_as_restarts_that_are_limited(disturbed: Disturbed) -> None:
    counts = {
        "early": 0,
        "requeue": 0,
        "term": 0,
        "limit": 0,
        "preempted": 0,
        "lost": 0,
        "fails": 2,
        "hopeless": 2,
    }
    for name, count in counts.items():
        job, _ = disturbed.over(name)
        failures = job.place / "failures"
        lines = failures.read_text().splitlines() if failures.exists() else []
        assert len(lines) == count, (name, lines)


def test_the_reason_of_a_failure_names_the_worker_and_its_exit_code(disturbed: Disturbed) -> None:
    _, hopeless = disturbed.over("hopeless")
    _, mistake = disturbed.over("mistake")

    code = "worker 0 ended with exit code"
    assert (hopeless.phase, hopeless.restarts) == (Phase.FAILED, 1)
    assert hopeless.reason == f"{code} 1; 2 starts failed, and max_restarts is 1"
    assert (mistake.phase, mistake.restarts) == (Phase.FAILED, 0)
    assert mistake.reason == f"{code} 2, which a restart would repeat; see logs/task-0.log"


def test_a_machine_without_what_the_target_needs_is_the_reason(disturbed: Disturbed) -> None:
    for name, reason in (
        ("setup", "no scratch disk"),
        ("module", "module cuda/12.5 cannot be loaded"),
    ):
        _, state = disturbed.over(name)
        assert (state.phase, state.reason, state.restarts) == (Phase.FAILED, reason, 0)


def test_a_job_that_is_stopped_saves_and_does_not_start_again(disturbed: Disturbed) -> None:
    for name, reason in (("stopped", "by stoker stop"), ("cancelled", "by scancel")):
        job, state = disturbed.over(name)
        assert (state.phase, state.reason, state.restarts) == (Phase.STOPPED, reason, 0)
        numbers = disturbed.counting.numbers(job, 0)
        assert numbers == list(range(len(numbers)))
        assert disturbed.counting.saved(job) == {"1-0", "1-1"}
    disturbed.counting.provider().stop(disturbed.jobs["stopped"].id)  # of one that is over: nothing
