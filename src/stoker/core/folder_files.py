"""The files in an experiment's folder that may be its code or data, and the folders that the code lists.

A listed folder is an input of the run: the names in it, except names that the run creates. In a folder from which the
run reads data, a new name belongs to the run only if this process has provably created it.

Python's audit hook reports listings by Python code, with the line of code. inotify reports all other listings, but not
which process made them. A folder that only inotify has reported is an input if a file in it was read, too, and if it
holds no Python module: Python's imports also list folders.
"""

from __future__ import annotations

import fnmatch
import functools
import hashlib
import itertools
import os
import re
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

MAX_FILE_BYTES = 64 << 20
"""Of a larger file, size and time are recorded instead of a hash of its content."""

SKIPPED = frozenset(
    [
        *("__pycache__", ".venv", ".git", ".ipynb_checkpoints", ".pytest_cache"),
        *(".mypy_cache", ".ruff_cache", ".vscode", ".idea", "stoker.yaml", "stoker.lock.yaml"),
        *("nohup.out", ".stokerignore", ".DS_Store", ".tune"),
    ]
)
"""Names in an experiment's folder that are neither code nor data. `stoker.yaml` is among them because settings are
fingerprinted separately."""

_PASSING = (
    *("*.log", ".lock", ".*.lock", ".cluster-*.json", "*.swp", "*.swo", "*~", ".#*", "#*#"),
    *("*.tmp", "*.pyc", "*.ipynb", "core.[0-9]*"),
)
"""Name patterns of files that appear next to the code but are not code: logs, locks, editors' copies, notebooks."""

IGNORE_FILE = ".stokerignore"
"""File in which the user lists more patterns of files that are not code, one per line, as in `.gitignore` without `!`
and `**`. A line that starts with `$` is a pattern of environment variables."""

_PASSING_VARIABLES = (
    *("PATH", "HOME", "PWD", "OLDPWD", "USER", "LOGNAME", "SHELL", "TERM", "HOST", "HOSTNAME"),
    *("TZ", "TMP", "TEMP", "TMPDIR", "DISPLAY", "LANG", "LC_*", "XDG_*", "SSH_*", "_", "SHLVL"),
    *("COLUMNS", "SLURM_*", "PBS_*", "KUBERNETES_*", "OMPI_*", "PMI_*", "TF_*", "STOKER_*"),
    *("NVIDIA_*", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "RANK", "LOCAL_RANK", "WORLD_SIZE"),
    *("MASTER_*", "OMP_NUM_THREADS", "WANDB_*", "MLFLOW_*", "COMET_*", "NEPTUNE_*", "*_TOKEN"),
    *("*_KEY", "*_SECRET", "*_PASSWORD", "AWS_*", "GOOGLE_APPLICATION_CREDENTIALS"),
)
"""Patterns of environment variables that the machine, the launcher, the experiment tracker or a login sets. They are
not inputs: a restarted job has other values but is the same job."""

_HALF_WRITTEN = ".stoker."
"""Start of the name of a temporary file that a killed process may leave behind."""

_RUN, _VERSION = ("run.json", "lock"), ("stoker.manifest.json",)
"""Files in each folder of a run, and in each folder of a model's version. Such a folder is never an input, wherever it
is."""

_LOOKED_AT = 100
"""Maximum number of entries of a folder that are checked to learn whether it holds only runs or versions."""

_NEXT_TO_VERSIONS = "aliases.json"
"""File that may be next to the versions of a model."""

MAX_FILES = 100_000
"""Maximum number of files and folders in an experiment's folder that are observed: the state of each is kept in
memory."""


class Ignored:
    """Decides which files in a user's folder are neither code nor data; `.stokerignore` may name more of them."""

    def __init__(self, folder: Path, *, also: Iterable[str] = ()) -> None:
        """Args: folder: The user's folder; also: more patterns, in the form of `.stokerignore`."""
        own = [line.strip("/") for line in _own_lines(folder) if not line.startswith("$")]
        own += also
        self._root = folder
        self._passing, self._own = _matches_any(_PASSING), _matches_any(own)
        self._folder = functools.cache(self._of_folder)

    def __call__(self, path: Path) -> bool:
        """Whether a file in the user's folder, or a folder that contains the file, is ignored."""
        return self.file(path.relative_to(self._root).as_posix())

    def file(self, name: str) -> bool:
        """Whether a file, or a folder that contains it, is ignored; `name` is relative to the user's folder."""
        parent, _, last = name.rpartition("/")
        return self.named(name, last) or (bool(parent) and self._folder(parent))

    def named(self, name: str, last: str) -> bool:
        """Whether a file or folder is ignored by its own name. The folders above it are not checked.

        Args:
            name: Path relative to the user's folder.
            last: The last part of that path.
        """
        return (
            last in SKIPPED
            or last.startswith(_HALF_WRITTEN)
            or self._passing(last)
            or self._own(last)
            or self._own(name)
        )

    def enters(self, entry: os.DirEntry[str], name: str) -> bool:
        """Whether an entry is a folder whose content may be an input. Links to folders are not followed.

        Args:
            entry: A file or a folder whose name is not ignored.
            name: Its path, relative to the user's folder.
        """
        return _is_folder(entry) and not entry.is_symlink() and not self._folder(name)

    def holds_outputs(self, name: str, *, versions: bool) -> bool:
        """Whether a folder holds an experiment's outputs, and nothing else.

        Args:
            name: Path relative to the user's folder.
            versions: Whether versions of a model are such outputs too, not only runs.
        """
        kinds = (_RUN, _VERSION) if versions else (_RUN,)
        held = [
            Path(entry.path)
            for entry in _entries(self._root / name, most=_LOOKED_AT)
            if entry.name[0] != "." and entry.name != _NEXT_TO_VERSIONS
        ]
        return bool(held) and all(any(_has(path, files) for files in kinds) for path in held)

    def _of_folder(self, name: str) -> bool:
        path = self._root / name
        return _has(path, _RUN) or _has(path, _VERSION) or self.file(name)


def _has(folder: Path, files: Iterable[str]) -> bool:
    return all((folder / file).is_file() for file in files)


def _matches_any(patterns: Iterable[str]) -> Callable[[str], bool]:
    """Return a function that tells whether a name matches one of the patterns."""
    each = re.compile("|".join(map(fnmatch.translate, patterns)) or "(?!)")
    return lambda name: each.match(name) is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """One folder that `walk` visits."""

    name: str
    """Path relative to the first folder of the walk; `.` for the first folder itself."""

    files: list[os.DirEntry[str]]
    """The folder's files that are not ignored, sorted by name; also links, and folders whose content is ignored."""

    left_out: bool = False
    """True if the folder has too many entries: then `files` is empty, and the walk skips all folders below it."""


def walk(
    folder: Path, *, is_ignored: Ignored, outputs: Collection[Path] = (), most: int = MAX_FILES
) -> Iterator[Place]:
    """Yield a folder and the folders below it, without ignored ones. No file is opened.

    Each folder may use up to half of what remains of the limit. So a large folder is left out, but small folders after
    it are not.

    Args:
        folder: The user's folder.
        is_ignored: The `Ignored` of the same folder.
        outputs: Folders to skip, with everything below them.
        most: Maximum number of files and folders in the whole walk.
    """
    left, ahead = most, deque([ROOT])
    while ahead:
        name = ahead.popleft()
        entries = _entries(folder / name, most=left // 2 + 1)
        if len(entries) > left // 2:
            yield Place(name=name, files=[], left_out=True)
            continue
        left -= len(entries)
        files = []
        for entry in entries:
            inside = within(name, entry.name)
            if is_ignored.named(inside, entry.name):
                continue
            if not is_ignored.enters(entry, inside):
                files.append(entry)
            elif Path(entry.path) not in outputs:
                ahead.append(inside)
        yield Place(name=name, files=files)


ROOT = "."
"""Name of the user's folder, relative to itself."""


def within(folder: str, name: str) -> str:
    """Return the relative path of an entry, from the relative path of its folder and its name."""
    return name if folder == ROOT else f"{folder}/{name}"


def _entries(folder: Path, *, most: int) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return sorted(itertools.islice(entries, most), key=lambda each: each.name)
    except OSError:
        return []


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False


def ignored_outside(folder: Path) -> Callable[[str], bool]:
    """Return a test for ignored files outside the user's folder: absolute patterns in `.stokerignore`."""
    own = [line for line in _own_lines(folder) if line.startswith("/")]
    return lambda path: any(fnmatch.fnmatchcase(path, pattern) for pattern in own)


def ignored_variables(folder: Path) -> Callable[[str], bool]:
    """Return a test for environment variables that do not affect a run; `.stokerignore` may name more."""
    own = [line[1:] for line in _own_lines(folder) if line.startswith("$")]

    def is_ignored(name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in (*_PASSING_VARIABLES, *own))

    return is_ignored


def _own_lines(folder: Path) -> list[str]:
    file = folder / IGNORE_FILE
    lines = file.read_text(errors="replace").splitlines() if file.is_file() else []
    return [line.strip() for line in lines if line.strip() and line.strip()[0] != "#"]


def folder_files(folder: Path, outputs: Collection[Path]) -> dict[str, str]:
    """Return every file that may be code or data: path relative to the folder -> mark of its content (`file_mark`).

    Args:
        folder: The user's folder.
        outputs: Folders that Stoker writes; they are left out.
    """
    places = walk(folder, is_ignored=Ignored(folder), outputs=outputs)
    files = sorted(Path(each.path) for place in places for each in place.files if each.is_file())
    return {path.relative_to(folder).as_posix(): file_mark(path) for path in files}


def file_mark(path: Path) -> str:
    """Return a text that changes with a file's content: its SHA-256; for a large file, its size and time."""
    if path.stat().st_size > MAX_FILE_BYTES:
        return time_mark(path)
    return hashlib.sha256(path.read_bytes()).hexdigest()


def time_mark(path: Path) -> str:
    """Return a text with a file's size and the time of its last change."""
    facts = path.stat()
    return f"{facts.st_size} bytes, {facts.st_mtime_ns}"


def is_time_mark(mark: str) -> bool:
    """Whether a mark was made by `time_mark`."""
    return " bytes, " in mark


MAX_OWN = 1_000
"""If a run creates more names than this in a folder, the names in that folder are not an input."""


def listing_mark(folder: Path, name: str, *, own: Collection[str]) -> str:
    """Return a hash of the names that are now in a folder; empty if the folder does not exist.

    Args:
        folder: The user's folder.
        name: The listed folder, relative to the user's.
        own: Names to leave out, relative to the user's folder. A name that ends in `/` is a folder in which models of
            other experiments are left out. Runs of other experiments are always left out.
    """
    is_ignored, with_versions = Ignored(folder), f"{name}/" in own
    try:
        with os.scandir(folder / name) as entries:
            found = [
                inside
                for entry in entries
                if not is_ignored.named(inside := within(name, entry.name), entry.name)
                and inside not in own
                and not is_ignored.holds_outputs(inside, versions=with_versions)
            ]
    except OSError:
        return ""
    return _mark(found)


def _mark(names: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(sorted(names)).encode(errors="surrogateescape")).hexdigest()


class Listings:
    """The folders that a run has listed, and the names that it has created in them."""

    def __init__(
        self,
        at_begin: Collection[str],
        *,
        own: Iterable[str],
        appeared: Iterable[str] = (),
        counted: Iterable[str],
    ) -> None:
        """Start with the records of the run's earlier processes.

        Args:
            at_begin: Names at the start of the run, relative to the user's folder. The name of a folder ends in `/` if
                the names in the folder are known.
            own: Names that the run has created.
            appeared: Names that the run or another process has created.
            counted: Folders that were listed.
        """
        self._at_begin = at_begin
        self._own: dict[str, set[str]] = {}
        self._appeared: dict[str, set[str]] = {}
        self._counted, self._seen = set(counted), set[str]()
        self._with_reads, self._with_modules = set[str](), {ROOT}
        for name in own:
            _add(self._own, name)
        for name in appeared:
            _add(self._appeared, name)

    @property
    def own(self) -> list[str]:
        """Names that the run has created."""
        return sorted(name for names in self._own.values() for name in names)

    @property
    def appeared(self) -> list[str]:
        """Names that were created during the run by an unknown process."""
        return sorted(set().union(*self._appeared.values()).difference(self.own))

    def is_folder(self, name: str) -> bool:
        """Whether this is a folder whose files and folders at the start of the run are known."""
        return f"{name}/" in self._at_begin

    def listed(self, name: str) -> bool:
        """Record that the user's code lists a folder. True if this is new and the folder may be an input."""
        new = name not in self._counted and self.is_folder(name)
        self._counted |= {name} if new else set()
        return new

    def seen(self, name: str) -> bool:
        """Record that an unknown process lists a folder. True if this is new and the folder may be an input."""
        new = name not in self._seen and name in self._with_reads - self._with_modules
        self._seen.add(name)
        return new

    def imported(self, name: str) -> None:
        """Record that a folder holds Python modules."""
        self._with_modules.add(name)

    def read(self, name: str) -> None:
        """Record that a file was read."""
        if name.endswith(".py"):
            self._with_modules.add(parent_of(name))
        else:
            self._with_reads.add(parent_of(name))

    def created(self, name: str, *, by_run: bool) -> bool:
        """Record a new file or folder. True if it is recorded for the first time.

        Args:
            name: Relative to the user's folder.
            by_run: The run has provably created it.
        """
        if (
            name in self._at_begin
            or self.is_folder(name)
            or name in self._own.get(parent_of(name), ())
        ):
            return False
        return _add(self._own if by_run else self._appeared, name)

    def _counts(self, name: str) -> bool:
        """Whether a listed folder is an input: its names at the start are known, and the run added few names."""
        most = max(
            len(self._own.get(name, ())),
            0 if name in self._with_reads else len(self._appeared.get(name, ())),
        )
        return self.is_folder(name) and most <= MAX_OWN

    def marks(self, *, own: Collection[str]) -> dict[str, str]:
        """Return listed folder -> hash of its names at the start of the run, without the names in `own`."""
        counted = self._counted | ((self._seen & self._with_reads) - self._with_modules)
        names: dict[str, list[str]] = {name: [] for name in counted if self._counts(name)}
        if names:
            for each in self._at_begin:
                plain = each.rstrip("/")
                if plain != ROOT and plain not in own and (parent := parent_of(plain)) in names:
                    names[parent].append(plain)
        return {name: _mark(found) for name, found in names.items()}


def _add(names: dict[str, set[str]], name: str) -> bool:
    """Add a name to the set of its folder, up to the limit. True if it was added."""
    there = names.setdefault(parent_of(name), set())
    if name in there or len(there) > MAX_OWN:
        return False
    there.add(name)
    return True


def parent_of(name: str) -> str:
    """Return the folder that contains a file or folder; both paths are relative to the user's folder."""
    return name.rpartition("/")[0] or ROOT
