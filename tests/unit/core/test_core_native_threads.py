"""The end of a process in which a thread runs native code: a substitute crashes as XLA would."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import atexit, ctypes, sys, threading, time
from stoker.cli import main
from stoker.core.threads import outlives_python

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


USERS = """
import concurrent.futures, io, types
FOLDER = sys.argv[1]

def late():
    time.sleep(0.5)
    sys.stdout.write("joined ")

threading.Thread(target=late).start()
pool = concurrent.futures.ThreadPoolExecutor(1)
pool.submit(time.sleep, 0.3)
pool.submit(sys.stdout.write, "queued ")
text, raw, both = open(FOLDER + "/text", "w"), open(FOLDER + "/raw", "wb"), open(FOLDER + "/both", "wb+")
text.write("text"), raw.write(b"raw"), both.write(b"both")
wrapped = io.TextIOWrapper(open(FOLDER + "/wrapped", "wb"), write_through=False)
wrapped.write("wrapped")
full = open("/dev/full", "w")
full.write("no room")
broken = io.TextIOWrapper(io.BytesIO()).detach()
atexit.register(text.write, " at exit")
sys.argv[1:] = ["refuse"]
main.main()
"""


def test_other_threads_end_and_open_files_are_written_before_the_process_ends(
    tmp_path: Path,
) -> None:
    found, out, err = ended(FAILS + USERS.replace("sys.argv[1]", repr(str(tmp_path))), crashes=True)

    assert (found, sorted(out.split()[:-2])) == (75, ["done", "joined", "queued"]), err
    assert out.endswith("at exit\n")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "text": "text at exit",
        "raw": "raw",
        "both": "both",
        "wrapped": "wrapped",
    }


def test_a_program_of_the_users_waits_and_says_so() -> None:
    found, out, err = ended("sys.exit(3)", crashes=False)

    assert (found, out) == (3, "done at exit\nworked\n")
    assert "XLA compiles and cannot be interrupted: waiting for its end" in err
