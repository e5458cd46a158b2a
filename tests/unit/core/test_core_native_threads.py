"""The end of a process in which a thread is inside of native code: a stand-in crashes as XLA would."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import atexit, ctypes, sys, threading, time
from stoker.app.cli import main
from stoker.core.native_threads import outlives_python

class Slow:
    # Python's end takes its time, as TensorFlow's does.
    def __del__(self):
        libc.usleep(4_000_000)

libc, slow = ctypes.CDLL(None), Slow()
ending, inside = threading.Event(), threading.Event()

def work():
    ending.wait()
    inside.set()
    libc.usleep(1_000_000)
    if CRASHES:
        libc.abort()
    print("worked")

def at_exit():
    print("at exit")
    ending.set()
    inside.wait()
    time.sleep(0.1)

thread = threading.Thread(target=work, daemon=True)
thread.start()
outlives_python(thread, does="XLA compiles")
atexit.register(at_exit)
print("done", end=" ")
"""

FAILS = """
main.app.command("fail")(lambda: 1 / 0)
main.app.command("refuse")(lambda: sys.exit(75))
"""


def ended(code: str, *, crashes: bool) -> tuple[int, str, str]:
    """Exit code and what the process has said."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.replace("CRASHES", str(crashes)) + code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(("command", "code"), [("--version", 0), ("refuse", 75), ("fail", 1)])
def test_the_command_line_keeps_its_exit_code_and_its_output_without_waiting(
    command: str, code: int
) -> None:
    end = f"{FAILS}\nsys.argv[1:] = [{command!r}]\nmain.main()"

    found, out, err = ended(end, crashes=True)

    assert found == code, err
    assert out.startswith("done ")
    assert out.endswith("at exit\n")
    assert ("ZeroDivisionError" in err) == (command == "fail")


def test_a_program_of_the_users_waits_and_says_so() -> None:
    found, out, err = ended("sys.exit(3)", crashes=False)

    assert (found, out) == (3, "done at exit\nworked\n")
    assert "XLA compiles, which cannot be interrupted: waiting for its end" in err
