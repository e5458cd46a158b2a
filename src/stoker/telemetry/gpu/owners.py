"""Finds the run that a process on a GPU trains, or the model that it serves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path

from stoker.telemetry.gpu.readings import GpuProcess

PROC = Path("/proc")

_MAX_PARENTS = 8
"""Maximum number of processes that are checked, from the process itself upward: a worker is a child process of its
training or server."""

_LOCK = "lock"
"""File in a run's folder that the run's process keeps open."""

_RUN = "run.json"
_MODEL_FLAGS = ("--model_name", "--model_base_path")


def owner_of(pid: int, memory_bytes: int | None, *, proc: Path = PROC) -> GpuProcess:
    """Return the run or model of a process; both are empty for processes of other users and other programs.

    Args:
        pid: The process ID.
        memory_bytes: GPU memory that the process uses, bytes; None if unknown.
        proc: Folder with the kernel's information about processes.
    """
    run = model = ""
    for each in _with_parents(pid, proc):
        run = run or _run_of(proc / str(each) / "fd")
        model = model or _model_of(_command(proc / str(each)))
    return GpuProcess(pid=pid, memory_bytes=memory_bytes, run=run, model=model)


def _with_parents(pid: int, proc: Path) -> Iterator[int]:
    for _ in range(_MAX_PARENTS):
        if pid <= 1:
            return
        yield pid
        try:
            # The name may contain any character and ends at the last parenthesis; state and parent follow it.
            pid = int((proc / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError, ValueError):
            return


def _run_of(open_files: Path) -> str:
    """NAME/ID of the run whose lock is among these open files; empty if none of them is a run's lock."""
    try:
        found = [path.readlink() for path in open_files.iterdir()]
    except OSError:
        return ""  # the process has ended, or belongs to another user
    for file in found:
        if file.name == _LOCK and (file.parent / _RUN).is_file():
            return f"{file.parent.parent.name}/{file.parent.name}"
    return ""


def _command(process: Path) -> list[str]:
    try:
        return (process / "cmdline").read_text(errors="replace").split("\0")[:-1]
    except OSError:
        return []


def _model_of(command: Sequence[str]) -> str:
    """The model of a `stoker serve` command: its `--model_name`, or else the name of the folder that it serves."""
    if not _is_server(command):
        return ""
    after = command[command.index("serve") + 1 :]
    values: dict[str, str] = {}
    for word, following in zip_longest(after, after[1:], fillvalue=""):
        flag, equals, value = word.partition("=")
        flag = "--" + flag.lstrip("-").replace("-", "_")
        if flag in _MODEL_FLAGS:
            values[flag] = value if equals else following
    folder = values.get("--model_base_path", "")
    if not folder and after and not after[0].startswith("-"):
        folder = after[0]
    return values.get("--model_name") or Path(folder).name


def _is_server(command: Sequence[str]) -> bool:
    """Whether a command is `stoker serve`, or `python -m stoker serve`."""
    if "serve" not in command:
        return False
    before = command[: command.index("serve")]
    return any(Path(word).name == "stoker" for word in before)
