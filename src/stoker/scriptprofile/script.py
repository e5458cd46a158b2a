"""Runs the user's command with the watcher inside it, and reads the observations of the watcher."""

from __future__ import annotations

import math
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from stoker.cluster.doctor.visible import watched_gpus
from stoker.cluster.processes import Child, ProcessOptions
from stoker.core.errors import Plain, UserError
from stoker.core.files import remove, writable
from stoker.core.signals import heard
from stoker.scriptprofile.facts import WatchedProcess, read_all
from stoker.scriptprofile.profile import Ending, ScriptProfile
from stoker.scriptprofile.rules.diagnose import diagnose, this_machine
from stoker.scriptprofile.rules.wall_rules import parts_json, shown_parts
from stoker.scriptprofile.utilization import with_reached

WATCHER = Path(__file__).resolve().parent / "watcher"
"""Folder with the watcher; Python runs its `sitecustomize.py` when it starts."""

FOLDER_VARIABLE = "STOKER_WATCH_FOLDER"
"""Environment variable with the folder to which the watcher writes."""

FACTS_S = 1.5
"""Maximum wait for the facts of a script before it is ended, seconds. The watcher checks for the request 5 times per
second, but Python may be in a long call."""

GRACE_S = 10.0
"""Time from SIGTERM to SIGKILL, seconds, in which a script may save its work."""

POLL_S = 0.05
"""Interval between two checks for the facts, seconds."""


def profile_script(
    command: Sequence[str],
    *,
    folder: Path,
    seconds: float | None = None,
    stdout: int | None = None,
    grace_s: float = GRACE_S,
    mfu: bool = True,
) -> ScriptProfile:
    """Run a command to its end, and return the profile of its training.

    Args:
        command: Argument vector, e.g. `["python", "train.py"]`.
        folder: The watcher writes to a hidden folder in it, which is removed at the end.
        seconds: Time limit of the command; None or 0: none.
        stdout: File descriptor for the command's output; by default the output of this process.
        grace_s: Time from SIGTERM to SIGKILL, seconds.
        mfu: After the command's end, count the operations of its steps and measure the device's peak. This takes
            some 10 seconds if a step was recorded.

    Returns:
        The profile. If the command fails, its exit code shows it; no exception is raised.

    Raises:
        UserError: the command cannot be started, or the folder cannot be written.
    """
    with writable(folder, what="the folder", fix="Write elsewhere with --out DIR."):
        folder.mkdir(parents=True, exist_ok=True)
        facts = Path(tempfile.mkdtemp(prefix=".watched-", dir=folder.absolute()))
    try:
        return _profiled(command, facts, seconds=seconds, stdout=stdout, grace_s=grace_s, mfu=mfu)
    finally:
        remove(facts)


def _profiled(
    command: Sequence[str],
    facts: Path,
    *,
    seconds: float | None,
    stdout: int | None,
    grace_s: float,
    mfu: bool,
) -> ScriptProfile:
    begun_s = time.monotonic()
    with watched_gpus() as gpu_states:
        code, ended_by = _run(command, facts, seconds=seconds, stdout=stdout, grace_s=grace_s)
    wall_s = time.monotonic() - begun_s
    processes = read_all(facts)
    if mfu:
        processes = with_reached(processes, facts)
    diagnosed = diagnose(processes, this_machine())
    return ScriptProfile(
        command=tuple(command),
        exit_code=code if code >= 0 else 128 - code,
        ended_by=ended_by,
        wall_s=wall_s,
        tensorflow=next((process.tensorflow for process in processes if process.tensorflow), ""),
        keras=next((process.keras["version"] for process in processes if process.keras), ""),
        backend=next((process.keras["backend"] for process in processes if process.keras), ""),
        gpus=max((process.gpus for process in processes), default=0),
        peak_memory_bytes=max((process.peak_memory_bytes for process in processes), default=0),
        gpu_peak_bytes=max((process.gpu_peak_bytes for process in processes), default=()),
        gpu_states=tuple(gpu_states()),
        loops=tuple(loop for process in processes for loop in process.loops),
        findings=diagnosed.findings,
        minor=diagnosed.minor,
        failures=tuple(_failures(processes, facts)),
        time_parts=tuple(shown_parts(processes[0])) if processes else (),
        waited=processes[0].waited if processes else 0.0,
        time_lines=tuple(parts_json(processes[0])) if processes else (),
    )


def _failures(processes: Sequence[WatchedProcess], facts: Path) -> Iterator[str]:
    for process in processes:
        yield from process.failures
    if (facts / "failed").is_file():
        yield from (facts / "failed").read_text().splitlines()


def _run(
    command: Sequence[str],
    facts: Path,
    *,
    seconds: float | None,
    stdout: int | None,
    grace_s: float,
) -> tuple[int, Ending]:
    """Run the command; return its exit code, and what ended it; the code is 0 if its time was over."""
    child = _start(command, facts, stdout=stdout)
    signaled = False

    def pass_on(number: signal.Signals) -> None:
        nonlocal signaled
        signaled = True
        _request_facts(facts)
        child.send_group(number)

    try:
        with heard((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), pass_on):
            code = child.wait(seconds or math.inf)
            if code is not None:
                return code, "signal" if signaled else "itself"
            _request_facts(facts)
            child.send_group(signal.SIGTERM)
            child.wait_for_group(grace_s)
    finally:
        child.kill()
        child.wait()
    # Stoker ended the command, so its exit code is not a failure.
    return 0, "time"


def _start(command: Sequence[str], facts: Path, *, stdout: int | None) -> Child:
    if not command:
        raise UserError(
            "a command must follow --", fix="Write `stoker profile -- python train.py`."
        )
    environment = dict(os.environ)
    theirs = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = os.pathsep.join([str(WATCHER), *([theirs] if theirs else [])])
    environment[FOLDER_VARIABLE] = str(facts)
    try:
        # Child processes of the command may continue after its end, as they would without the profiler.
        return Child(
            command[0],
            command,
            ProcessOptions(
                environ=environment, stdin=None, output=stdout, parent_death=None, ends_group=False
            ),
        )
    except OSError as error:
        raise UserError(
            f"{command[0]} must be a program that can be run",
            got=Plain(error.strerror or str(error)),
            fix=_how_to_start(command[0]),
        ) from error


def _how_to_start(program: str) -> str:
    if program.endswith(".py"):
        return f"Write `stoker profile -- python {program}`."
    if shutil.which("python") is None and program == "python":
        return "`python` is not on the PATH: write python3, or the path of an interpreter."
    return "Check the program's name, and the PATH."


def _request_facts(facts: Path) -> None:
    """Make every watched process write its facts now, and wait for them briefly."""
    (facts / "wanted").touch()
    wrote = (path.stem.removeprefix("facts-") for path in facts.glob("facts-*.json"))
    watched = [pid for pid in wrote if Path("/proc", pid).exists()]
    until_s = time.monotonic() + FACTS_S
    while time.monotonic() < until_s:
        if all((facts / f"wanted-{pid}").exists() for pid in watched):
            return
        # Poll: the watcher's thread writes a file, and sends no other notification.
        time.sleep(POLL_S)
