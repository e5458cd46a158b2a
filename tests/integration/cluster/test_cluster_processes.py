"""The kit for child processes, with real ones: they end, they are reaped, nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stoker.cluster.processes import Child, Lines, ProcessOptions, how_it_ended, last_line
from stoker.cluster.processes.child import LINE_BYTES, LOG_TAIL_BYTES, TAIL_LINES
from stoker.core.errors import UserError

DEAF = "import signal, time; signal.signal(15, signal.SIG_IGN); print('deaf'); time.sleep(600)"
"""Ignores SIGTERM."""


def python(program: str, *arguments: str) -> list[str]:
    return [sys.executable, "-S", "-u", "-c", program, *arguments]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for(claim: Callable[[], object]) -> None:
    give_up_s = time.monotonic() + 60
    while not claim():
        assert time.monotonic() < give_up_s
        time.sleep(0.02)


def is_gone(*pids: int) -> Callable[[], bool]:
    return lambda: not any(map(is_running, pids))


PARENT = """
import subprocess, sys, time
from pathlib import Path
from stoker.cluster.processes import Child, ProcessOptions
program = [sys.executable, "-S", "-c", "import sys; sys.stdin.read(); import time; time.sleep({s})"]
how = dict(bound={{}}, lifeline=dict(stdin=subprocess.PIPE, parent_death=None))[sys.argv[1]]
child = Child("child", program, ProcessOptions(**how))
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("how", ["bound", "lifeline"])
def test_a_child_ends_when_its_parent_is_killed(how: str) -> None:
    # With a signal of the kernel, also in the middle of its work; or by the end of its input.
    program = PARENT.format(s=600 if how == "bound" else 0)
    parent = subprocess.Popen(
        [sys.executable, "-c", program, how], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    wait_for(lambda: "exec_shim" not in Path(f"/proc/{pid}/cmdline").read_text())
    assert is_running(pid)

    parent.kill()
    parent.communicate()

    wait_for(is_gone(pid))


def test_a_child_whose_parent_died_before_it_could_ask_for_the_signal_does_not_start() -> None:
    shim = Path(sys.modules["stoker.cluster.processes"].__path__[0], "exec_shim.py")
    gone = subprocess.Popen(["true"])
    gone.wait()

    done = subprocess.run(
        [sys.executable, "-S", str(shim), str(gone.pid), "9", "-", "echo", "started"],
        capture_output=True,
    )

    assert (done.returncode, done.stdout) == (1, b"")


def test_a_child_that_ignores_sigterm_is_killed_after_its_grace(tmp_path: Path) -> None:
    child = Child("deaf", python(DEAF), ProcessOptions(output=tmp_path / "log"))
    wait_for(lambda: last_line(tmp_path / "log") == "deaf")

    child.send(signal.SIGTERM)

    assert not child.end(0.3)
    assert child.code == -signal.SIGKILL
    assert not is_running(child.pid)


def test_a_child_that_ends_in_its_grace_is_not_killed() -> None:
    child = Child("child", python("import time; time.sleep(0.1)"))

    assert child.end(60)
    assert child.code == 0


def test_a_child_that_is_never_ready_is_given_up() -> None:
    child = Child("child", ["sleep", "600"], ProcessOptions(ready_file=Path("/nowhere/ready.json")))

    assert not child.wait_until_ready(0.2)
    assert child.code is None, "it goes on until it is ended"
    child.kill()
    assert child.wait(60) == -signal.SIGKILL


def test_a_child_that_ends_before_it_is_ready_is_not_waited_for(tmp_path: Path) -> None:
    child = Child("child", ["false"], ProcessOptions(ready_file=tmp_path / "ready"))

    assert not child.wait_until_ready(600)
    assert child.code == 1


def test_a_ready_file_of_an_earlier_child_does_not_count(tmp_path: Path) -> None:
    ready = tmp_path / "a folder\nof two lines" / "ready"
    ready.parent.mkdir()
    ready.touch()
    program = "import pathlib, sys; sys.stdin.read(); pathlib.Path(sys.argv[1]).touch()"
    child = Child(
        "child",
        python(program, str(ready)),
        ProcessOptions(stdin=subprocess.PIPE, ready_file=ready),
    )

    assert not child.is_ready
    child.close_input()
    assert child.wait_until_ready(60)
    assert child.end(60)


@pytest.mark.parametrize("program", ["/nowhere/a b\nc", "/", __file__])
def test_a_program_that_cannot_be_started_is_named(program: str, tmp_path: Path) -> None:
    child = Child("child", [program], ProcessOptions(output=tmp_path / "log"))

    assert child.wait(60) == 127
    assert last_line(tmp_path / "log").startswith(f"{program!r} cannot be started: ")
    with pytest.raises(OSError, match=r"No such file|denied"):
        Child("child", [program], ProcessOptions(parent_death=None))


def test_a_process_that_the_kernel_refuses_is_a_clear_error() -> None:
    program = """
import resource
from stoker.cluster.processes import Child
resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
Child("worker 1", ["true"])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)

    assert "the kernel must allow worker 1 to be started" in done.stderr.splitlines()[-1]


def test_what_a_child_started_is_killed_before_its_number_is_free(tmp_path: Path) -> None:
    started = "import subprocess; print(subprocess.Popen(['sleep', '600']).pid)"
    child = Child("child", python(started), ProcessOptions(output=tmp_path / "log"))

    assert child.wait(60) == 0

    wait_for(is_gone(int(last_line(tmp_path / "log"))))


def test_what_a_child_started_may_go_on_and_be_ended_later(tmp_path: Path) -> None:
    started = "import subprocess; print(subprocess.Popen(['sleep', '600']).pid)"
    child = Child(
        "child", python(started), ProcessOptions(output=tmp_path / "log", ends_group=False)
    )
    wait_for(child.has_ended)
    grandchild = int(last_line(tmp_path / "log"))

    child.wait_for_group(0.2)
    assert is_running(grandchild)
    child.kill()
    child.wait_for_group(60)
    assert not is_running(grandchild)
    assert child.code == 0


def test_nothing_is_sent_to_a_child_that_is_reaped() -> None:
    child = Child("child", ["true"])
    child.wait(60)
    reused = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        # As if the kernel had given the number to another process.
        child._popen.pid = reused.pid
        child.send(signal.SIGKILL)
        child.kill()
        assert child.end(0)
        with pytest.raises(subprocess.TimeoutExpired):
            reused.wait(0.5)
    finally:
        reused.kill()
        reused.wait()


def test_a_child_is_reaped_once_by_many_threads() -> None:
    child = Child("child", ["sleep", "0.3"])
    codes: list[int | None] = []
    threads = [threading.Thread(target=lambda: codes.append(child.wait(60))) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert codes == [0] * 20


def test_a_child_that_another_has_already_waited_for_keeps_its_code() -> None:
    child = Child("child", python("raise SystemExit(5)"))

    assert (child.wait(60), child.code, child.has_ended()) == (5, 5, True)
    child.kill()
    assert child.code == 5


def test_a_child_runs_on_its_cores_only(tmp_path: Path) -> None:
    core = max(os.sched_getaffinity(0))
    program = python("import os; print(os.sched_getaffinity(0))")

    child = Child(
        "child", program, ProcessOptions(output=tmp_path / "log", cores=[core], parent_death=None)
    )

    assert child.wait(60) == 0
    assert last_line(tmp_path / "log") == f"{{{core}}}"


def test_its_environment_and_its_descriptors_are_those_given() -> None:
    read, write = os.pipe()
    program = "import os, sys; os.write(int(sys.argv[1]), repr(dict(os.environ)).encode())"
    child = Child(
        "child",
        python(program, str(write)),
        ProcessOptions(environ={"A": "x y\n"}, pass_fds=[write]),
    )
    os.close(write)
    with os.fdopen(read) as stream:
        written = stream.read()

    assert child.wait(60) == 0
    assert "'A': 'x y\\n'" in written
    assert "HOME" not in written


def lines_of(program: str) -> tuple[Lines, list[str]]:
    said: list[str] = []
    child = Child("child", python(program), ProcessOptions(output=subprocess.PIPE))
    lines = Lines(child.output, said.append)
    wait_for(lambda: not lines.read())
    child.output.close()
    assert child.wait(60) == 0
    return lines, said


def test_lines_come_whole_and_the_last_of_them_are_kept() -> None:
    program = f"import sys\nfor n in range({TAIL_LINES + 5}): print('line', n)\n"
    program += "sys.stdout.buffer.write(b'\\xff last')"

    lines, said = lines_of(program)

    assert said == [f"line {n}" for n in range(TAIL_LINES + 5)] + ["\N{REPLACEMENT CHARACTER} last"]
    assert list(lines.tail) == said[-TAIL_LINES:]


def test_a_huge_line_comes_in_pieces_and_nothing_is_lost() -> None:
    lines, said = lines_of(f"print('x' * {20 * LINE_BYTES}); print('end')")

    assert "".join(said) == "x" * 20 * LINE_BYTES + "end"
    assert said[-1] == "end"
    assert max(map(len, said)) <= 2 * LINE_BYTES
    assert len(lines.tail) <= TAIL_LINES


def test_lines_are_followed_by_a_thread_until_the_child_ends() -> None:
    said: list[str] = []
    child = Child(
        "child", python("print('a'); print('b', end='')"), ProcessOptions(output=subprocess.PIPE)
    )
    Lines(child.output, said.append).follow()

    assert child.wait(60) == 0
    wait_for(lambda: said == ["a", "b"])
    wait_for(lambda: child.output.closed)


def test_everything_that_a_child_printed_is_passed_on_after_a_drain() -> None:
    said: list[str] = []

    def slow(line: str) -> None:
        time.sleep(0.0001)  # slower than the child prints
        said.append(line)

    program = "for n in range(3000): print(n)"
    child = Child("child", python(program), ProcessOptions(output=subprocess.PIPE))
    lines = Lines(child.output, slow)
    lines.follow()
    assert child.wait(60) == 0

    lines.drain()

    assert said == [str(n) for n in range(3000)]


def test_of_a_huge_last_line_of_a_log_the_end_is_shown(tmp_path: Path) -> None:
    log = tmp_path / "log"
    child = Child("child", python(f"print('x' * {1 << 22} + ' end')"), ProcessOptions(output=log))

    assert child.wait(60) == 0
    shown = last_line(log)
    assert shown.endswith("x end")
    assert len(shown) < LOG_TAIL_BYTES


def test_a_log_that_cannot_be_read_says_so(tmp_path: Path) -> None:
    assert "cannot be read: No such file" in last_line(tmp_path / "none")
    (tmp_path / "empty").touch()
    assert last_line(tmp_path / "empty") == ""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk with room for one small file."""
    folder = tmp_path / "disk"
    folder.mkdir()
    options = "size=8k,nr_inodes=2"
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"no tmpfs here: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_without_room_for_its_log_a_child_is_not_started(small_disk: Path, tmp_path: Path) -> None:
    (small_disk / "taken").touch()

    with pytest.raises(UserError, match="must have room"):
        Child(
            "child", ["touch", str(tmp_path / "started")], ProcessOptions(output=small_disk / "log")
        )

    time.sleep(0.5)  # enough for a child that was started to write its file
    assert not (tmp_path / "started").exists()


def test_a_log_that_fills_its_disk_fails_the_child_and_can_be_read(small_disk: Path) -> None:
    child = Child("child", ["yes"], ProcessOptions(output=small_disk / "log"))

    assert child.wait(60) == 1
    assert last_line(small_disk / "log") in ("y", "")


def test_an_exit_code_is_described_in_words() -> None:
    assert how_it_ended(3) == "ended with exit code 3"
    assert how_it_ended(-9) == "was killed by SIGKILL"
    assert how_it_ended(-77) == "was killed by signal 77"
