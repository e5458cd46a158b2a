"""Processes that train together: killed, stopped, starved and abandoned for real."""

from __future__ import annotations

import hashlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from stoker.cluster.launch import Launched, LaunchSettings, WorkerFailed, launch
from stoker.cluster.launch.member import Beat
from stoker.core.errors import EXIT_PREEMPTED, ConfigError, UserError

STEPS = 60

WORKER = """
import hashlib, os, signal, sys, time
from pathlib import Path

from stoker.train.context.heartbeat import process_heartbeat

heartbeat = process_heartbeat()
folder, rank = Path(sys.argv[1]), os.environ["STOKER_RANK"]
state = folder / f"state-{rank}"
ending = []
signal.signal(signal.SIGTERM, lambda *_: ending.append(1))
step, weights = 0, b""
if state.exists():
    step, weights = int(state.read_bytes()[:8]), state.read_bytes()[8:]
print(f"at {step} pid {os.getpid()}")

def save():
    made = folder / f"made-{rank}"
    made.write_bytes(b"%08d" % step + weights)
    made.replace(state)

heartbeat.enter("train")
while step < STEPS:
    if (folder / f"fault-{rank}").exists():
        exec((folder / f"fault-{rank}").read_text())
    weights = hashlib.sha256(weights + b"%d" % step).digest()
    step += 1
    heartbeat.beat(step)
    if step % 10 == 0:
        save()
        print(f"step {step} pid {os.getpid()}")
    if ending:
        save()
        sys.exit(75)
    time.sleep(0.01)
save()
heartbeat.finish()
""".replace("STEPS", str(STEPS))


def expected_weights() -> bytes:
    weights = b""
    for step in range(STEPS):
        weights = hashlib.sha256(weights + b"%d" % step).digest()
    return weights


@dataclass
class Seen:
    """What a launcher said, and what is done when it says it."""

    lines: list[str] = field(default_factory=list)
    beats: list[Beat] = field(default_factory=list)
    at: Callable[[str], None] = lambda line: None

    def log(self, line: str) -> None:
        self.lines.append(line)
        self.at(line)

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


def run(
    folder: Path,
    seen: Seen,
    *,
    program: str = WORKER,
    environ: Mapping[str, str] = os.environ,
    **settings: object,
) -> Launched:
    return launch(
        [sys.executable, "-c", program, str(folder)],
        settings=LaunchSettings(**{"workers": 2, **settings}),  # type: ignore[arg-type]  # mypy cannot check **
        log=seen.log,
        on_beat=seen.beats.append,
        environ=environ,
    )


def once(folder: Path, pattern: str, act: Callable[[int], None]) -> Callable[[str], None]:
    """Act on the process that first says a line."""
    done: list[str] = []

    def at(line: str) -> None:
        found = re.search(rf"{pattern} pid (\d+)", line)
        if found and not done:
            done.append(line)
            act(int(found[1]))

    return at


def require_same_weights(folder: Path, *, workers: int = 2) -> None:
    for rank in range(workers):
        assert (folder / f"state-{rank}").read_bytes()[8:] == expected_weights()


def test_all_work_is_done_and_every_line_names_its_worker(tmp_path: Path) -> None:
    seen = Seen()

    launched = run(tmp_path, seen, workers=3)

    assert launched == Launched(preempted=False, restarts=())
    require_same_weights(tmp_path, workers=3)
    for rank in range(3):
        assert any(line.startswith(f"[worker {rank}] step {STEPS} ") for line in seen.lines)
        assert [b for b in seen.beats if b.rank == rank][-1].phase == "done"


def test_a_killed_worker_is_named_and_all_go_on_to_the_same_weights(tmp_path: Path) -> None:
    seen = Seen()
    seen.at = once(tmp_path, r"worker 1\] step 20", lambda pid: os.kill(pid, signal.SIGKILL))

    launched = run(tmp_path, seen)

    assert launched.restarts == ("worker 1 was killed by SIGKILL",)
    assert "worker 1 was killed by SIGKILL. Its last lines:\n  | at 0 pid" in seen.text
    assert re.search(r"\[worker 1\] at [1-9]\d* ", seen.text), "it went on from its checkpoint"
    assert re.search(r"\[worker 0\] at [1-9]", seen.text), "the other one was started again too"
    require_same_weights(tmp_path)


def test_the_first_worker_may_die_like_any_other(tmp_path: Path) -> None:
    seen = Seen()
    seen.at = once(tmp_path, r"worker 0\] step 30", lambda pid: os.kill(pid, signal.SIGKILL))

    assert run(tmp_path, seen).restarts == ("worker 0 was killed by SIGKILL",)
    require_same_weights(tmp_path)


def test_a_stopped_worker_is_named_with_its_stack_and_all_go_on(tmp_path: Path) -> None:
    seen = Seen()
    waiting = "import time; time.sleep(600) if step == 30 else None"
    (tmp_path / "fault-0").write_text(waiting)

    def stop(pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)
        (tmp_path / "fault-0").write_text(waiting + '; "the others wait in vain"')

    def at(line: str) -> None:
        stopping(line)
        if "hangs" in line:
            (tmp_path / "fault-0").unlink()

    stopping = once(tmp_path, r"worker 1\] step 20", stop)
    seen.at = at

    launched = run(tmp_path, seen, watchdog_s=3)

    (why,) = launched.restarts
    assert re.fullmatch(r"worker 1 hangs: no heartbeat for [345] s", why)
    dumped = [line for line in seen.lines if line.startswith("[worker 1]   File")]
    assert dumped, seen.text
    assert "[worker 1] Current thread" in seen.text
    require_same_weights(tmp_path)


def test_a_worker_that_beats_without_a_step_is_named_with_its_stack(tmp_path: Path) -> None:
    seen = Seen()
    (tmp_path / "fault-1").write_text(
        "def wait_for_data():\n    time.sleep(600)\nif step == 20: wait_for_data()\n"
    )

    def at(line: str) -> None:
        if "hangs" in line:
            (tmp_path / "fault-1").unlink()

    seen.at = at

    launched = run(tmp_path, seen, watchdog_s=3)

    (why,) = launched.restarts
    assert re.fullmatch(r"worker 1 hangs: at step 20, phase train, for [345] s", why)
    assert "in wait_for_data" in seen.text
    require_same_weights(tmp_path)


def test_restarts_have_a_budget_and_the_error_names_the_worker_and_how_it_failed(
    tmp_path: Path,
) -> None:
    (tmp_path / "fault-1").write_text("if step == 10: os.kill(os.getpid(), signal.SIGSEGV)")

    with pytest.raises(WorkerFailed) as caught:
        run(tmp_path, Seen(), max_restarts=1)

    assert "worker 1 was killed by SIGSEGV, after 1 restart" in str(caught.value)
    assert caught.value.exit_code == 1


def test_an_error_before_the_first_step_is_not_tried_again(tmp_path: Path) -> None:
    seen = Seen()
    failing = "import sys; print('no such module'); sys.exit(1)"

    with pytest.raises(WorkerFailed, match=r"exit code 1\. Received: no such module") as caught:
        run(tmp_path, seen, program=failing)

    assert caught.value.failure.code == 1
    assert "start again" not in seen.text


def test_an_error_of_the_users_ends_the_others_and_keeps_its_code(tmp_path: Path) -> None:
    seen = Seen()
    (tmp_path / "fault-1").write_text("if step == 20: print('label must be 0 or 1'); sys.exit(2)")
    (tmp_path / "fault-0").write_text("if step == 30: time.sleep(600)")

    with pytest.raises(WorkerFailed) as caught:
        run(tmp_path, seen)

    assert (caught.value.exit_code, caught.value.failure.name) == (2, "worker 1")
    assert "label must be 0 or 1" in str(caught.value)
    assert "start again" not in seen.text


def test_a_worker_that_is_taken_away_costs_no_restart_of_the_budget(tmp_path: Path) -> None:
    seen = Seen()
    seen.at = once(tmp_path, r"worker 1\] step 20", lambda pid: os.kill(pid, signal.SIGTERM))

    launched = run(tmp_path, seen, max_restarts=0)

    assert launched.restarts == ("worker 1 ended with exit code 75",)
    require_same_weights(tmp_path)


def test_what_a_worker_started_dies_with_it(tmp_path: Path) -> None:
    seen = Seen()
    (tmp_path / "fault-1").write_text(
        "import subprocess\n"
        "if step == 10:\n"
        "    child = subprocess.Popen(['sleep', '611'])\n"
        "    print(f'child pid {child.pid}'); sys.exit(2)\n"
    )
    children: list[int] = []
    seen.at = once(tmp_path, "child", children.append)

    with pytest.raises(WorkerFailed):
        run(tmp_path, seen)

    (child,) = children
    assert not is_alive(child)


def test_each_worker_gets_its_own_cores_and_threads_and_place(tmp_path: Path) -> None:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("one core cannot be shared out")
    seen = Seen()
    telling = (
        "import json, os; e = os.environ; print('seen:', json.dumps([sorted(os.sched_getaffinity(0)),"
        " e['OMP_NUM_THREADS'], e['TF_NUM_INTRAOP_THREADS'], json.loads(e['TF_CONFIG'])]))"
    )
    environ = {k: v for k, v in os.environ.items() if not k.endswith("_THREADS")}

    run(tmp_path, seen, program=telling, pin=True, environ=environ)

    by_worker = {
        line.split("]")[0][1:]: json.loads(line.split("seen: ")[1])
        for line in seen.lines
        if "seen:" in line
    }
    each = len(cores) // 2
    assert by_worker["worker 0"][0] == cores[:each]
    assert by_worker["worker 1"][0] == cores[each : 2 * each]
    assert by_worker["worker 0"][1:3] == [str(each)] * 2
    addresses = by_worker["worker 0"][3]["cluster"]["worker"]
    assert len(set(addresses)) == 2
    assert all(address.startswith("127.0.0.1:") for address in addresses)
    assert by_worker["worker 1"][3]["task"] == {"type": "worker", "index": 1}


def test_with_parameter_servers_a_dead_worker_comes_back_alone_and_all_end_with_the_chief(
    tmp_path: Path,
) -> None:
    seen = Seen()
    serving = (
        "import json, os, sys, time; from pathlib import Path\n"
        "from stoker.train.context.heartbeat import process_heartbeat\n"
        "heartbeat = process_heartbeat(); config = json.loads(os.environ['TF_CONFIG'])\n"
        "job, index = config['task']['type'], config['task']['index']\n"
        "print('is', job, config['cluster'][job][index])\n"
        "if job == 'chief':\n    heartbeat.enter('train'); time.sleep(2); heartbeat.finish()\n"
        "else:\n    heartbeat.enter('serve'); time.sleep(0.5)\n"
        "    died = Path(sys.argv[1]) / 'died'\n"
        "    if (job, index) == ('worker', 1) and not died.exists():\n"
        "        died.touch(); os.kill(os.getpid(), 9)\n"
        "    time.sleep(600)\n"
    )

    launched = run(tmp_path, seen, program=serving, servers=1)

    assert launched == Launched(preempted=False, restarts=())
    again = "it is started again (and after that 2 more times at most)"
    assert f"worker 1 was killed by SIGKILL; {again}" in seen.lines
    said = [line.split(" is ") for line in seen.lines if " is " in line and "[" in line]
    assert sorted(name for name, _ in said) == [
        "[chief]",
        "[ps 0]",
        "[worker 0]",
        "[worker 1]",
        "[worker 1]",
    ]
    assert len({address for _, address in said}) == 4, "it came back at its address"


DRIVER = """
import sys
from pathlib import Path

sys.path.insert(0, str(Path(sys.argv[2]).parent))
import test_cluster_launch as t

folder = Path(sys.argv[1])
launched = t.run(folder, t.Seen(at=lambda line: print(line, flush=True)), workers=2)
sys.exit(t.EXIT_PREEMPTED if launched.preempted else 0)
"""


def start_launcher(folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(folder), __file__],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait_for(process: subprocess.Popen[str], pattern: str) -> re.Match[str]:
    assert process.stdout is not None
    for line in process.stdout:
        if found := re.search(pattern, line):
            return found
    raise AssertionError(f"no {pattern}")


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def descendants(pid: int) -> set[int]:
    """A process and all that it and its children started, as the kernel knows them now."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return {pid}.union(*(descendants(int(child)) for child in children))


def test_no_worker_is_left_when_the_launcher_is_killed(tmp_path: Path) -> None:
    (tmp_path / "fault-0").write_text(
        "import subprocess\n"
        "if step == 20: subprocess.Popen(['sleep', '612']); print('slept'); time.sleep(600)"
    )
    process = start_launcher(tmp_path)
    wait_for(process, "slept")
    family = descendants(process.pid)
    assert len(family) == 5, "launcher, orphan killer, two workers, and what one of them started"

    process.kill()
    process.communicate()

    give_up_s = time.monotonic() + 60
    while alive := [pid for pid in family if is_alive(pid)]:
        assert time.monotonic() < give_up_s, alive
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_launcher_that_gets_a_signal_has_its_workers_save_and_exits_75(
    tmp_path: Path, number: signal.Signals
) -> None:
    process = start_launcher(tmp_path)
    wait_for(process, r"worker 1\] step 10")
    while not (tmp_path / "state-0").exists():  # before that, the signal would kill worker 0
        time.sleep(0.01)

    process.send_signal(number)

    said, _ = process.communicate(timeout=300)
    assert process.returncode == EXIT_PREEMPTED
    assert "workers save and end" in said
    assert all((tmp_path / f"state-{rank}").exists() for rank in range(2))
    assert run(tmp_path, Seen()) == Launched(preempted=False, restarts=())
    require_same_weights(tmp_path)


def test_more_processes_than_descriptors_allow_are_refused_in_one_line(tmp_path: Path) -> None:
    program = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\n"
        + DRIVER.replace("workers=2", "workers=40")
    )

    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path), __file__], capture_output=True, text=True
    )

    assert "40 processes need a limit of at least 256 open files" in done.stderr.splitlines()[-1]


def test_a_kernel_that_starts_no_more_processes_is_named(tmp_path: Path) -> None:
    pids = Path("/sys/fs/cgroup/pids")
    if os.geteuid() != 0 or not pids.is_dir():
        pytest.skip("a group of processes with a limit needs root and cgroup v1 pids")
    group = pids / f"stoker-test-{os.getpid()}"
    group.mkdir()
    try:
        (group / "pids.max").write_text("8")
        program = f"open({str(group / 'cgroup.procs')!r}, 'w').write('0')\n" + DRIVER.replace(
            "workers=2", "workers=12"
        )

        done = subprocess.run(
            [sys.executable, "-c", program, str(tmp_path), __file__],
            capture_output=True,
            text=True,
        )

        assert "the kernel must allow worker" in done.stderr.splitlines()[-1], done.stderr
        assert "ulimit -u" in done.stderr
        assert not (group / "cgroup.procs").read_text(), "no process is left"
    finally:
        remove_group(group)


def test_a_worker_that_the_kernel_kills_for_memory_is_named_so(tmp_path: Path) -> None:
    memory = Path("/sys/fs/cgroup/memory")
    if os.geteuid() != 0 or not memory.is_dir():
        pytest.skip("a group with a limit of memory needs root and cgroup v1 memory")
    group = memory / f"stoker-test-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(256 << 20))
        # Without these the kernel may move the memory to a swap file, or choose the launcher.
        (group / "memory.swappiness").write_text("0")
        choose_me = "open('/proc/self/oom_score_adj', 'w').write('1000')"
        hoard = "hoard = b'1' * (1 << 30)"
        (tmp_path / "fault-1").write_text(f"if step == 20: {choose_me}; {hoard}")
        program = f"open({str(group / 'cgroup.procs')!r}, 'w').write('0')\n" + DRIVER.replace(
            "workers=2", "workers=2, max_restarts=0"
        )

        done = subprocess.run(
            [sys.executable, "-c", program, str(tmp_path), __file__],
            capture_output=True,
            text=True,
        )

        assert "worker 1 was killed by SIGKILL; out of memory" in done.stderr, done
        assert "batch_size" in done.stderr.splitlines()[-1]
    finally:
        remove_group(group)


def remove_group(group: Path) -> None:
    give_up_s = time.monotonic() + 60
    while True:
        try:
            group.rmdir()
            return
        except OSError:
            # The kernel needs a moment after the last process of it.
            assert time.monotonic() < give_up_s
            time.sleep(0.02)


@pytest.mark.parametrize("workers", [0, 2000])
def test_a_senseless_number_of_workers_is_refused(workers: int) -> None:
    with pytest.raises(ConfigError, match="--workers must be from 1 to 1024"):
        LaunchSettings(workers=workers)


def test_the_launchers_limit_of_open_files_is_raised_as_far_as_it_may(tmp_path: Path) -> None:
    program = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 512))\n" + DRIVER

    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path), __file__], capture_output=True, text=True
    )

    assert done.returncode == 0, done.stderr
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= 64


def test_user_errors_of_the_launcher_are_the_users() -> None:
    assert issubclass(WorkerFailed, UserError)
