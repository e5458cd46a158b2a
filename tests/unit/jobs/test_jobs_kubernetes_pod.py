"""What runs in the pods of a job, as processes of this machine that share the job's folder."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stoker.core.errors import ConfigError, DataError
from stoker.core.incarnation import INCARNATIONS
from stoker.jobs.archive import CODE, Archive, pack, read_hashes
from stoker.jobs.job import Job, Resources
from stoker.jobs.providers.kubernetes.pod.facts import FACTS, Facts
from stoker.jobs.providers.kubernetes.pod.git import code_of_commit
from stoker.jobs.providers.kubernetes.pod.start import Member, another_counts, write_exit

WAIT_S = 60.0
"""Longest wait, seconds: a busy machine."""

TASK = """\
#!/bin/sh
# job-task FOLDER --incarnation N: ends as the test has written to FOLDER/ends-N-RANK, and saves on USR1.
place=$5 number=$7
rank=${STOKER_RANK:-$(echo "$TF_CONFIG" | sed 's/.*"index": \\([0-9]*\\).*/\\1/')}
echo "$TF_CONFIG" > "$place/task-$number-$rank"
trap 'exit 75' USR1
until [ -e "$place/ends-$number-$rank" ]; do sleep 0.05; done
exit "$(cat "$place/ends-$number-$rank")"
"""
"""Stands for Python in the image: `python -P -m stoker job-task ...`."""


class Pods:
    """The pods of one job."""

    def __init__(self, job: Job, archive: Archive, scratch: Path, **facts: Any) -> None:
        self.place, self._scratch = job.place, scratch
        self.mounted = scratch / "mounted"
        self.mounted.mkdir()
        (self.mounted / "job.json").write_text(json.dumps(job.to_json()))
        (self.mounted / CODE).write_bytes(archive.content)
        python = scratch / "python"
        python.write_text(TASK)
        python.chmod(0o755)
        workers = tuple(f"w-{rank}.w:{2222 + rank}" for rank in range(job.resources.workers))
        chosen: dict[str, Any] = {"kind": "job", "start_s": 60, "max_restarts": 1, "grace_s": 10}
        self.facts = Facts(
            place=str(job.place), python=str(python), workers=workers, **chosen | facts
        )
        self.running: list[subprocess.Popen[bytes]] = []

    def start(self, rank: int, name: str) -> subprocess.Popen[bytes]:
        """Start a pod with a rank."""
        own = {
            FACTS: json.dumps(self.facts.to_json()),
            "JOB_COMPLETION_INDEX": str(rank),
            "STOKER_POD": name,
            "STOKER_KUBERNETES_CODE": str(self.mounted),
        }
        with (self._scratch / f"{name}.out").open("w") as output:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "stoker.jobs.providers.kubernetes.pod.main"],
                env=os.environ | own,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.running.append(process)
        return process

    def printed(self, name: str) -> str:
        """What a pod has printed."""
        return (self._scratch / f"{name}.out").read_text()

    def started(self, number: int, rank: int) -> Path:
        """Wait until the task of a rank runs in a start; its file with TF_CONFIG."""
        path = self.place / f"task-{number}-{rank}"
        wait(path.exists, f"start {number} of worker {rank}")
        return path

    def end(self, number: int, rank: int, code: int) -> None:
        """Let a task end."""
        made = self.place / f".ends-{number}-{rank}"
        made.write_text(str(code))
        made.rename(self.place / f"ends-{number}-{rank}")

    def starts(self) -> list[int]:
        """Numbers of the starts so far."""
        names = [path.name for path in (self.place / INCARNATIONS).iterdir()]
        return sorted(int(name) for name in names if name.isdecimal())


def wait(is_there: Callable[[], bool], what: str) -> None:
    until_s = time.monotonic() + WAIT_S
    while not is_there():
        assert time.monotonic() < until_s, what
        time.sleep(0.05)  # files of other processes


def code_of(process: subprocess.Popen[bytes]) -> int:
    return process.wait(timeout=WAIT_S)


Make = Callable[..., Pods]


@pytest.fixture
def make(experiment: Path, job: Job, tmp_path: Path) -> Iterator[Make]:
    made: list[Pods] = []
    archive = pack(experiment)

    def build(*, workers: int = 2, **facts: Any) -> Pods:
        wanted = replace(job, code=archive.digest, resources=Resources(workers=workers))
        made.append(Pods(wanted, archive, tmp_path, **facts))
        return made[-1]

    yield build
    for process in (each for pods in made for each in pods.running):
        end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a pod with its task, as a node that is lost does."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def test_pods_get_job_and_code_from_the_config_map_and_train_together(make: Make) -> None:
    pods = make()
    two = [pods.start(rank, f"first-{rank}") for rank in (1, 0)]
    config = json.loads(pods.started(1, 1).read_text())
    pods.started(1, 0)

    assert config["cluster"]["worker"] == ["w-0.w:2222", "w-1.w:2223"]
    assert config["task"] == {"type": "worker", "index": 1}
    assert (pods.place / CODE).read_bytes() == (pods.mounted / CODE).read_bytes()
    pods.end(1, 0, 0)
    time.sleep(
        0.5
    )  # a pod that is done waits for the other: else that one would miss it after a restart
    assert two[1].poll() is None
    pods.end(1, 1, 0)
    assert [code_of(each) for each in two] == [0, 0]
    assert pods.starts() == [1], "one start for both"


def test_a_replaced_pod_begins_the_next_start_and_the_others_follow(make: Make) -> None:
    pods = make()
    survivor, victim = pods.start(0, "a-0"), pods.start(1, "a-1")
    pods.started(1, 0), pods.started(1, 1)
    end(victim)

    pods.start(1, "b-1")
    wait(lambda: pods.starts() == [1, 2], "the replacement takes the next number")
    pods.end(1, 0, 1)  # what TensorFlow does when its peer is gone
    assert code_of(survivor) == 75, "it failed because of the other: not counted"
    pods.start(0, "b-0")
    pods.started(2, 0), pods.started(2, 1)
    for rank in (0, 1):
        pods.end(2, rank, 0)
    assert pods.starts() == [1, 2]


@pytest.mark.parametrize(
    ("kind", "code", "known"),
    [("jobset", 75, 75), ("jobset", 1, 1), ("jobset", 3, 2), ("job", 1, 75), ("tfjob", 2, 2)],
)
def test_a_pod_saves_when_another_one_has_ended_and_does_not_hide_why(
    make: Make, kind: str, code: int, known: int
) -> None:
    pods = make(kind=kind)
    two = [pods.start(rank, f"a-{rank}") for rank in (0, 1)]
    for rank in (0, 1):
        pods.started(1, rank)
    pods.end(1, 0, code)
    assert code_of(two[1]) == known
    assert code_of(two[0]) == {3: 2}.get(code, code)


def test_a_pod_that_is_done_asks_for_no_restart_that_another_has_ruled_out(make: Make) -> None:
    pods = make(kind="tfjob")
    two = [pods.start(rank, f"a-{rank}") for rank in (0, 1)]
    for rank in (0, 1):
        pods.started(1, rank)
    pods.end(1, 1, 0)
    pods.end(1, 0, 2)
    assert [code_of(each) for each in two] == [2, 0]


def test_of_pods_that_fail_together_one_counts(tmp_path: Path) -> None:
    (tmp_path / INCARNATIONS).mkdir()
    (tmp_path / INCARNATIONS / "1").touch()
    two = [Member(place=tmp_path, rank=rank, pod=f"p-{rank}", pods=2, log=print) for rank in (0, 1)]
    for member in two:
        write_exit(member, 1, 1)
    assert [another_counts(member, 1, longest_s=0) for member in two] == [False, True]

    for number, codes in ((2, (1, 75)), (3, (1,)), (4, (1, 1))):
        (tmp_path / INCARNATIONS / str(number)).touch()
        for rank, code in enumerate(codes):
            write_exit(two[rank], number, code)
    assert not another_counts(two[0], 2, longest_s=0), "the other saved because of this one"
    assert another_counts(two[0], 3, longest_s=0), "the other was killed: it noted no end"
    assert not another_counts(two[0], 4, longest_s=0)


def test_the_task_of_a_pod_that_must_end_saves(make: Make) -> None:
    pods = make(workers=1)
    pod = pods.start(0, "a")
    assert pods.started(1, 0).read_text().strip() == "", "no TF_CONFIG for one worker"
    pod.send_signal(signal.SIGTERM)
    assert code_of(pod) == 75


def test_a_start_saves_at_its_time_limit(make: Make) -> None:
    pods = make(workers=1, time_limit_s=12.0, grace_s=10)
    pod = pods.start(0, "a")
    assert code_of(pod) == 75


def test_pods_that_do_not_all_come_end_and_name_the_missing_ones(make: Make) -> None:
    pods = make(workers=3, start_s=2)
    pod = pods.start(1, "a-1")

    assert code_of(pod) == 2, "nothing starts it again: its GPU is free for the other job"
    last = pods.printed("a-1").strip().splitlines()[-1]
    assert last.startswith("stoker: all 3 pods of a job must start within 2 s of each other.")
    assert "nothing from the pods of worker 0, 2" in last
    # What comes in its place, or with a second submission, does not complete that start and work alone.
    late = pods.start(0, "a-0")
    assert code_of(late) == 2
    assert pods.starts() == [1, 2]
    assert "nothing from the pods of worker 1, 2" in pods.printed("a-0")


def test_an_elastic_job_starts_with_the_pods_that_come_and_again_with_all_when_more_do(
    make: Make,
) -> None:
    """Three of four are admitted: two share the work evenly, and the third is not needed."""
    pods = make(workers=4, min_workers=2, start_s=20, grace_s=2)
    pods.facts = replace(pods.facts, start_s=6)
    first = [pods.start(rank, f"a-{rank}") for rank in range(3)]
    config = json.loads(pods.started(1, 1).read_text())
    pods.started(1, 0)
    assert config["cluster"]["worker"] == ["w-0.w:2222", "w-1.w:2223"]
    assert code_of(first[2]) == 0
    assert "this pod is not needed" in pods.printed("a-2")
    assert "start 1 as worker 0; 2 of 4 workers" in pods.printed("a-0")

    pods.facts = replace(pods.facts, start_s=60)
    for rank in (2, 3):
        pods.start(rank, f"b-{rank}")
    wait(lambda: pods.starts() == [1, 2], "the pods that come later begin the next start")
    for rank in (0, 1):
        pods.end(1, rank, 76)
        assert code_of(first[rank]) == 75, "a later start ends it"
        pods.start(rank, f"b-{rank}")
    config = json.loads(pods.started(2, 3).read_text())
    assert len(config["cluster"]["worker"]) == 4
    assert pods.starts() == [1, 2]


@pytest.mark.parametrize(
    ("kind", "codes"),
    [
        ("jobset", {0: 0, 134: 1, 2: 2, 3: 2, 76: 75}),
        ("tfjob", {3: 2, 75: 138}),
    ],
)
def test_exit_codes_are_those_that_the_rules_know(
    make: Make, kind: str, codes: dict[int, int]
) -> None:
    pods = make(workers=1, kind=kind)
    for number, (code, known) in enumerate(codes.items(), start=1):
        pod = pods.start(0, f"pod-{number}")
        pods.started(number, 0)
        pods.end(number, 0, code)
        assert code_of(pod) == known, code


def test_a_tfjob_fails_after_max_restarts_failures(make: Make) -> None:
    pods = make(workers=1, kind="tfjob", max_restarts=1)
    ends = []
    for number in (1, 2):
        pod = pods.start(0, f"pod-{number}")
        pods.started(number, 0)
        pods.end(number, 0, 1)
        ends.append(code_of(pod))
    assert ends == [138, 2], "its operator counts nothing"


def test_a_pod_without_a_job_says_what_is_missing(make: Make) -> None:
    pods = make(workers=1)
    (pods.mounted / "job.json").unlink()
    pod = pods.start(0, "a")
    assert code_of(pod) == 2
    assert "neither the volume of the runs nor a ConfigMap has it" in pods.printed("a")


def test_code_comes_from_a_commit_only_if_it_is_what_was_submitted(
    experiment: Path, tmp_path: Path
) -> None:
    archive = pack(experiment, outside=[experiment / "data"])
    (experiment / "other.py").write_text("")
    commit = _committed(experiment)
    source = f"git+file://{experiment.parent}@{commit}#subdirectory={experiment.name}"

    assert code_of_commit(source, read_hashes(archive.content)) == archive.content
    (experiment / "model.py").write_text("import layers  # changed\n")
    changed = read_hashes(pack(experiment, outside=[experiment / "data"]).content)
    with pytest.raises(DataError, match=r"what was submitted: model\.py\. Received: it is another"):
        code_of_commit(source, changed)
    with pytest.raises(ConfigError, match="git fetch must succeed in the pod"):
        code_of_commit(source.replace(commit, "0" * 40), changed)


def _committed(experiment: Path) -> str:
    def git(*arguments: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        done = subprocess.run(
            ["git", *who, *arguments],
            cwd=experiment.parent,
            check=True,
            capture_output=True,
            text=True,
        )
        return done.stdout.strip()

    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message=a")
    return git("rev-parse", "HEAD")
