"""What is written for Slurm and read from it, without a Slurm."""

from __future__ import annotations

import shlex
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stoker.core.errors import ConfigError
from stoker.jobs.job import Job, Resources
from stoker.jobs.places import Submitted
from stoker.jobs.provider import Phase
from stoker.jobs.providers.slurm.capacity import require_capacity, seconds
from stoker.jobs.providers.slurm.client import AccountedStart, NodeGroup, QueuedJob
from stoker.jobs.providers.slurm.problems import AnswerLost, problem, why_it_waits
from stoker.jobs.providers.slurm.script import job_id_of, quoted, render
from stoker.jobs.providers.slurm.settings import SlurmTarget
from stoker.jobs.providers.slurm.state import known_state


def job(**more: Any) -> Job:
    facts: dict[str, Any] = {
        "name": "trip",
        "command": ("train",),
        "folder": Path("/home/me/trip"),
        "runs": Path("/shared/runs of 'me' \"x\" $HOME"),
        "code": "0" * 64,
    }
    return Job(**facts | more)


def options(script: str) -> list[str]:
    """The options of sbatch in a script; its quotes and backslashes are those of a shell here."""
    lines = [line for line in script.splitlines() if line.startswith("#SBATCH ")]
    return [word for line in lines for word in shlex.split(line.removeprefix("#SBATCH "))]


def test_the_script_is_bash_and_its_options_are_the_requested_ones() -> None:
    needs = Resources(workers=4, gpus=2, cpus=8, memory_gib=1.5, time_limit_s=3661)
    target = SlurmTarget(
        partition="gpu", gpu_type="a100", nodes=2, sbatch=("--constraint=ib&hdr",), grace_s=300
    )
    wanted = job(resources=needs, labels={"team": 'vision "1"'})
    script = render(wanted, target)

    assert set(options(script)) >= {
        *("--partition=gpu", "--nodes=2", "--ntasks=4", "--ntasks-per-node=2", "--cpus-per-task=8"),
        *("--mem=3072M", "--time=0-01:02:00", "--gres=gpu:a100:4", "--signal=B:URG@300"),
        *("--requeue", "--open-mode=append", "--output=logs/slurm.log", "--export=ALL"),
        f"--chdir={wanted.place}",
    }
    comment = next(each for each in options(script) if each.startswith("--comment="))
    assert '"team": "vision \\"1\\""' in comment
    assert job_id_of(comment.partition("=")[2]) == f"trip-{script.partition('Job trip-')[2][:8]}"
    assert "#SBATCH --constraint=ib&hdr\n" in script, "passed on unchanged"
    assert "--gpu-bind=per_task:2" in script
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_an_elastic_job_takes_a_range_of_nodes_and_starts_a_task_on_each(tmp_path: Path) -> None:
    wanted = job(runs=tmp_path, resources=Resources(workers=8, min_workers=2, gpus=1))
    script = render(wanted, SlurmTarget(gpus_by="gpus-per-task"))

    found = options(script)
    assert {"--nodes=2-8", "--gres=gpu:1"} <= set(found)
    assert "task" not in " ".join(found).replace("cpus-per-task", ""), "Slurm would take the fewest"
    head = script.partition("\nsay() {")[0]
    shown = 'printf "%s\\n" "$workers" "${step[@]}"'
    done = subprocess.run(
        ["bash"],
        input=f"SLURM_JOB_NUM_NODES=5\n{head}\n{shown}",
        text=True,
        capture_output=True,
        check=True,
    )
    assert done.stdout.split() == ["5", "--ntasks=5", "--ntasks-per-node=1"]


def test_an_elastic_job_has_one_worker_on_each_node_and_fits_where_its_fewest_do() -> None:
    wanted = job(resources=Resources(workers=8, min_workers=2))
    group = NodeGroup(
        partition="gpu",
        is_default=True,
        nodes=4,
        cpus=8,
        memory_mib=1024,
        gpus=0,
        time_limit="infinite",
    )

    require_capacity(wanted, SlurmTarget(), [group])
    with pytest.raises(ConfigError, match="at most the 4 machines"):
        require_capacity(job(resources=Resources(workers=8)), SlurmTarget(), [group])
    with pytest.raises(ConfigError, match="an elastic job must have one worker on each node"):
        render(wanted, SlurmTarget(nodes=4))


def test_names_that_are_code_stay_names(tmp_path: Path) -> None:
    hostile = "$(touch x)`touch x`'; touch x; '\"\\"
    target = SlurmTarget(environment={"A": hostile}, modules=(hostile,), python=f"/{hostile}")
    folder = hostile.replace("\\", "")
    script = render(job(runs=tmp_path / folder, environment={"B": hostile}), target)
    head, _, rest = script.partition("\nsay() {")
    setup = [line for line in rest.splitlines() if line.startswith(("export ", "module load "))]

    stubs = 'module() { printf "%s\\n" "$2"; }; end() { :; }'  # the login may define `module`
    shown = "\n".join([head, stubs, *setup, 'printf "%s\\n" "$place" "$python" "$A" "$B"'])
    done = subprocess.run(
        ["bash"], input=shown, text=True, capture_output=True, cwd=tmp_path, check=True
    )

    lines = done.stdout.splitlines()
    assert lines[0] == lines[3] == lines[4] == hostile
    assert lines[2] == f"/{hostile}"
    assert folder in lines[1]
    assert list(tmp_path.iterdir()) == []


def test_values_of_secrets_are_not_in_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "hunter2")

    script = render(job(secrets=("TOKEN",)), SlurmTarget())

    assert "secrets=(TOKEN)" in script
    assert "hunter2" not in script


@pytest.mark.parametrize("name", ["A B", "A;touch x", "", "1A"])
def test_a_secret_that_is_not_a_variable_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="must name environment variables"):
        render(job(secrets=(name,)), SlurmTarget())


def test_a_value_with_a_line_break_is_not_passed_to_sbatch() -> None:
    with pytest.raises(ConfigError, match="line breaks"):
        quoted("a\n#SBATCH --uid=0")


GROUP = NodeGroup(
    partition="gpu",
    is_default=True,
    nodes=4,
    gpus=8,
    cpus=64,
    memory_mib=1024 * 512,
    time_limit="2-12:00:00",
)


@pytest.mark.parametrize(
    ("needs", "words"),
    [
        ({"gpus": 9}, "at most the 8 GPUs of a machine in partition gpu. Received: 9"),
        ({"workers": 5}, "at most the 4 machines of partition gpu. Received: 5"),
        (
            {"time_limit_s": 2.5 * 86400 + 1},
            "at most 216000 s, the limit of partition gpu. Received: 216001 s",
        ),
        ({"gpus": 8, "workers": 4, "time_limit_s": 2.5 * 86400, "cpus": 64}, None),
    ],
)
def test_a_job_must_fit_the_partition(needs: dict[str, Any], words: str | None) -> None:
    wanted = job(resources=Resources(**needs))
    other = replace(GROUP, partition="cpu", is_default=False, gpus=99, nodes=99)
    if words is None:
        require_capacity(wanted, SlurmTarget(), [GROUP, other])
        return
    with pytest.raises(ConfigError) as caught:
        require_capacity(wanted, SlurmTarget(), [GROUP, other])
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("limit", "expected"),
    [("infinite", None), ("n/a", None), ("30:00", 1800), ("1:00:00", 3600), ("1-00:00:01", 86401)],
)
def test_limits_are_read(limit: str, expected: float | None) -> None:
    assert seconds(limit) == expected


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("scancel: error: Kill job error on job id 7: Access/permission denied", "be your own"),
        ("sbatch: error: Batch job submission failed: Invalid qos specification", "qos must be"),
        (
            "sbatch: unrecognized option '--x'\nTry \"sbatch --help\" for more information",
            "Received: unrecognized option '--x'. ",
        ),
        ("", "Received: exit code 1"),
    ],
)
def test_a_failure_is_one_line(output: str, words: str) -> None:
    line = str(problem("sbatch", 1, output))

    assert words in line
    assert "\n" not in line


def test_a_killed_sbatch_may_have_submitted_the_job() -> None:
    assert isinstance(problem("sbatch", -9, ""), AnswerLost)
    assert not isinstance(problem("sinfo", -9, ""), AnswerLost)


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("None", "waits until Slurm has looked at it"),
        ("QOSMaxGRESPerUser", "waits: a limit of its account or quality of service is reached"),
        ("ReqNodeNotAvail, UnavailableNodes:n1", "waits: machines that it requests are down"),
        ("JobHeldUser", "is held by its user: scontrol release 7"),
        ("SomethingNew", "waits: Slurm says SomethingNew"),
    ],
)
def test_reasons_are_translated(reason: str, words: str) -> None:
    assert why_it_waits(reason, "7").startswith(words)


def state_of(place: Path, state: str | None, *starts: AccountedStart) -> Any:
    queued = QueuedJob(
        id="7",
        state=state or "",
        reason="Resources",
        name="trip",
        user="me",
        submitted_s=1.0,
        started_s=2.0,
        ended_s=3.0,
        nodes="n[1-2]",
        comment="",
    )
    noted = Submitted(target="cluster", scheduler_id="7", submitted_s=1.0)
    return known_state("trip-1", place, noted, queued=queued if state else None, starts=starts)


@pytest.mark.parametrize(
    ("state", "files", "phase", "reason"),
    [
        ("PENDING", {}, Phase.WAITING, "waits until enough machines are free (Resources)"),
        ("PENDING", {"incarnations/1": ""}, Phase.RESTARTING, "waits until enough"),
        ("RUNNING", {"stop": ""}, Phase.RUNNING, ""),
        ("CANCELLED", {}, Phase.STOPPED, "by scancel"),
        ("CANCELLED", {"stop": ""}, Phase.STOPPED, "by stoker stop"),
        ("COMPLETED", {"outcome": "0 done\n"}, Phase.DONE, ""),
        ("COMPLETED", {}, Phase.FAILED, "its script ended before the workers"),
        ("FAILED", {"outcome": "1 worker 0 failed\n"}, Phase.FAILED, "worker 0 failed"),
        (
            "OUT_OF_MEMORY",
            {},
            Phase.FAILED,
            "a worker used more memory than the job's limit; submit it with more: --memory",
        ),
        ("NEW_STATE", {}, Phase.FAILED, "Slurm calls it NEW_STATE"),
        (None, {"outcome": "0 done\n"}, Phase.DONE, ""),
        (None, {"outcome": "2 no\n"}, Phase.FAILED, "no"),
        (None, {"stop": ""}, Phase.STOPPED, "by stoker stop"),
        (None, {}, Phase.UNKNOWN, "Slurm's controller has no record of it"),
    ],
)
def test_the_state_of_a_job_is_that_of_slurm_and_of_its_folder(
    tmp_path: Path, state: str | None, files: dict[str, str], phase: Phase, reason: str
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)

    found = state_of(tmp_path, state)

    assert found.phase is phase
    assert found.reason.startswith(reason)
    assert (found.expected_start_s == 2.0) is (state == "PENDING")


def test_gpu_seconds_are_those_of_all_starts(tmp_path: Path) -> None:
    """A preempted start counts too: 18 s and 3 s of 4 GPUs."""
    first = AccountedStart(
        id="7",
        name="trip-1",
        state="PREEMPTED",
        elapsed_s=18.0,
        gpus=4,
        started_s=1.0,
        ended_s=19.0,
    )
    second = replace(first, state="COMPLETED", elapsed_s=3.0)
    other = replace(first, name="other-1")
    without = replace(first, gpus=0)

    assert state_of(tmp_path, "COMPLETED", first, second).gpu_seconds == 84.0
    assert state_of(tmp_path, "COMPLETED", other, second).gpu_seconds == 12.0, "a number is reused"
    assert state_of(tmp_path, "COMPLETED").gpu_seconds is None
    assert state_of(tmp_path, "COMPLETED", without).gpu_seconds is None, "the cluster may not count"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"sbatch": ("--comment=x",)}, "must not contain --comment"),
        ({"sbatch": ("-p main",)}, "long options"),
        ({"setup": ("a\n#SBATCH --nodes=9",)}, "line breaks"),
        ({"partition": "a\nb"}, "line breaks"),
        ({"partition": "--help"}, "begin with -"),
        ({"environment": {"A B": "x"}}, "name environment variables"),
        ({"grace_s": 1}, "from 10 to 65535"),
    ],
)
def test_settings_that_would_change_the_script_are_refused(
    settings: dict[str, object], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        SlurmTarget(**settings)  # type: ignore[arg-type]  # some are wrong on purpose


def test_a_job_whose_script_died_of_an_early_signal_says_what_to_do(tmp_path: Path) -> None:
    submitted = Submitted(target="c", scheduler_id="7", submitted_s=1.0)
    start = AccountedStart(
        id="7",
        name="trip-12345678",
        state="FAILED",
        elapsed_s=1.0,
        gpus=0,
        started_s=1.0,
        ended_s=2.0,
        signal=15,
    )

    def state() -> tuple[Phase, str]:
        known = known_state("trip-12345678", tmp_path, submitted, queued=None, starts=[start])
        return known.phase, known.reason

    phase, reason = state()
    assert phase is Phase.FAILED
    assert reason.startswith("a signal ended its script, most likely before its first line")
    assert "submit it again: it goes on from its last checkpoint" in reason
    (tmp_path / "stop").touch()
    assert state() == (Phase.STOPPED, "by stoker stop")


@pytest.mark.parametrize("state", ["PENDING", "RUNNING", "REQUEUED"])
def test_a_job_that_runs_only_in_the_accounting_is_not_taken_for_a_running_one(
    tmp_path: Path, state: str
) -> None:
    """A controller that was killed has forgotten what it had not saved yet."""
    start = AccountedStart(
        id="7", name="trip-1", state=state, elapsed_s=1.0, gpus=0, started_s=1.0, ended_s=None
    )

    found = state_of(tmp_path, None, start)

    assert found.phase is Phase.UNKNOWN
    assert "submit it again" in found.reason
