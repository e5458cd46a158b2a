"""The files in an experiment's folder that may be its code or data, and their content."""

from __future__ import annotations

import fnmatch
import hashlib
from collections.abc import Callable, Collection
from pathlib import Path

MAX_FILE_BYTES = 64 << 20
"""In an undecidable folder, a larger file counts by its size and time, not by its content."""

SKIPPED = frozenset(
    [
        *("runs", "models", "__pycache__", ".venv", ".git", ".ipynb_checkpoints", ".pytest_cache"),
        *(".mypy_cache", ".ruff_cache", ".vscode", ".idea", "stoker.yaml", "stoker.lock.yaml"),
        *("nohup.out", ".stokerignore", ".DS_Store"),
    ]
)
"""Files in an experiment's folder that are not code; settings count separately."""

_PASSING = ("*.log", "*.swp", "*.swo", "*~", ".#*", "#*#", "*.tmp", "*.pyc", "*.ipynb", "core.*")
"""Names of files that come and go next to the code: logs, editors' copies, notebooks."""

IGNORE_FILE = ".stokerignore"
"""File with more such patterns, one per line, as in `.gitignore` without `!` and `**`. A line that
starts with `$` names environment variables."""

_PASSING_VARIABLES = (
    *(
        "PATH",
        "HOME",
        "PWD",
        "OLDPWD",
        "USER",
        "LOGNAME",
        "SHELL",
        "TERM",
        "HOST",
        "HOSTNAME",
        "TZ",
    ),
    *(
        "TMP",
        "TEMP",
        "TMPDIR",
        "DISPLAY",
        "LANG",
        "LC_*",
        "XDG_*",
        "SSH_*",
        "_",
        "SHLVL",
        "COLUMNS",
    ),
    *("SLURM_*", "PBS_*", "KUBERNETES_*", "OMPI_*", "PMI_*", "TF_*", "STOKER_*", "NVIDIA_*"),
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_*"),
    *("OMP_NUM_THREADS", "WANDB_*", "MLFLOW_*", "COMET_*", "NEPTUNE_*", "*_TOKEN", "*_KEY"),
    *("*_SECRET", "*_PASSWORD", "AWS_*", "GOOGLE_APPLICATION_CREDENTIALS"),
)
"""Variables of the machine, the launcher, the experiment tracker and credentials. A restarted job
has different values but is the same job."""

_HALF_WRITTEN = ".stoker."
"""Start of the name of a temporary file that a killed process may leave behind."""


def ignored(folder: Path) -> Callable[[Path], bool]:
    """Return a test for files that are not code of a user's folder; `.stokerignore` applies too.

    Args:
        folder: The user's folder; the test takes paths below it.
    """
    own = [line.strip("/") for line in _own_lines(folder) if not line.startswith("$")]

    def is_ignored(path: Path) -> bool:
        relative = path.relative_to(folder)
        if SKIPPED.intersection(relative.parts) or path.name.startswith(_HALF_WRITTEN):
            return True
        places = [relative.as_posix(), *relative.parts, *map(Path.as_posix, relative.parents)]
        by_user = any(fnmatch.fnmatch(place, pattern) for place in places for pattern in own)
        return by_user or any(fnmatch.fnmatch(path.name, pattern) for pattern in _PASSING)

    return is_ignored


def ignored_outside(folder: Path) -> Callable[[str], bool]:
    """A test for files outside of a user's folder, by the absolute patterns of `.stokerignore`."""
    own = [line for line in _own_lines(folder) if line.startswith("/")]
    return lambda path: any(fnmatch.fnmatchcase(path, pattern) for pattern in own)


def ignored_variables(folder: Path) -> Callable[[str], bool]:
    """Return a test for environment variables that do not affect a run, by `.stokerignore` too."""
    own = [line[1:] for line in _own_lines(folder) if line.startswith("$")]

    def is_ignored(name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in (*_PASSING_VARIABLES, *own))

    return is_ignored


def _own_lines(folder: Path) -> list[str]:
    file = folder / IGNORE_FILE
    lines = file.read_text(errors="replace").splitlines() if file.is_file() else []
    return [line.strip() for line in lines if line.strip() and line.strip()[0] != "#"]


def folder_files(folder: Path, outputs: Collection[Path]) -> dict[str, str]:
    """Every such file, relative to the folder -> its content mark.

    Args:
        folder: The user's folder.
        outputs: Folders that Stoker writes, which do not count.
    """
    is_ignored = ignored(folder)
    files = sorted(
        path
        for path in folder.rglob("*")
        if path.is_file()
        and not is_ignored(path)
        and not any(path.is_relative_to(output) for output in outputs)
    )
    return {path.relative_to(folder).as_posix(): file_mark(path) for path in files}


def file_mark(path: Path) -> str:
    """A file's content as text: its SHA-256, or size and time for a large one."""
    if path.stat().st_size > MAX_FILE_BYTES:
        return time_mark(path)
    return hashlib.sha256(path.read_bytes()).hexdigest()


def time_mark(path: Path) -> str:
    """Size and time of the last change."""
    facts = path.stat()
    return f"{facts.st_size} bytes, {facts.st_mtime_ns}"


def is_time_mark(mark: str) -> bool:
    """Whether a mark was made by `time_mark`."""
    return " bytes, " in mark
