"""Reads the lock file of an experiment, and checks that a job can use it."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

import stoker
from stoker.core.errors import ConfigError, Plain, UserError
from stoker.core.git_repository import up_to_repository
from stoker.jobs.lock_files import LOCKS, PROJECT_LOCK, find_lock

_DIGITS = 16
_FIX = "Make it so: uv pip compile --generate-hashes -o requirements.lock requirements.in"
_RELATIVE = re.compile(r"^\.{1,2}/\S+", re.MULTILINE)
_NOT_WHOLE = ("-r", "-c", "-e", "--requirement", "--constraint", "--editable")


@dataclass(frozen=True, kw_only=True, slots=True)
class Lock:
    """A lock file from which an environment is made."""

    path: Path
    """Path of the lock file, in the experiment's folder or above it."""

    text: str
    """The requirements with hashes, one per line."""

    def folder(self, environments: Path, python: str) -> Path:
        """Return the folder of the environment, whose name is a hash of the requirements."""
        content = f"{python}\n{self.text}".encode()
        return environments / hashlib.sha256(content).hexdigest()[:_DIGITS]


def read_lock(folder: Path) -> Lock:
    """Return the lock file of an experiment's folder, or of the nearest folder above it in its repository.

    Raises:
        ConfigError: the lock file is missing, does not pin a requirement, or does not contain this version of Stoker.
        UserError: `uv.lock` cannot be read.
    """
    path = find_lock(folder)
    if path is None:
        *_, root = up_to_repository(folder)
        above = f" or a folder above it up to {root}" if root != folder.resolve() else ""
        raise ConfigError(
            f"{folder}{above} must have a lock, as the target has `environment_from: lock`",
            got=Plain(f"none of {', '.join(LOCKS)}"),
            fix=f"{_FIX}.",
        )
    text = (
        _exported(path, folder) if path.name == PROJECT_LOCK else path.read_text(errors="replace")
    )
    lines = [_require_locked(line, path) for line in _logical_lines(text)]
    _require_stoker([each for each in lines if each is not None], path)
    return Lock(path=path, text=text)


def _exported(path: Path, folder: Path) -> str:
    """Return `uv.lock` as requirements, without the projects themselves: their code is in the archive.

    Args:
        path: The lock file, of a project or of a workspace.
        folder: The experiment's folder; the packages of the project that contains it are returned.
    """
    program = shutil.which("uv")
    if program is None:
        raise UserError(
            f"uv must be on the PATH to read {path}",
            got=Plain("no such program"),
            fix="Install it: pip install uv.",
        )
    options = ("--frozen", "--no-dev", "--no-emit-workspace", "--no-header", "--quiet")
    indexes = ("--emit-index-url", "--emit-find-links")
    done = subprocess.run(
        [
            program,
            "export",
            *options,
            *indexes,
            "--format=requirements-txt",
            f"--project={folder}",
        ],
        check=False,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise ConfigError(
            f"{path} must be a lock that uv can export", got=Plain(lines[0]), fix="Run: uv lock."
        )
    return _RELATIVE.sub(lambda found: _wheel_line(path.parent / found[0]), done.stdout)


def _wheel_line(wheel: Path) -> str:
    """Return the requirement for a wheel inside the project, with an absolute URL: `uv.lock` has a relative path."""
    return f"{wheel.name.partition('-')[0]} @ {wheel.resolve().as_uri()}"


def _logical_lines(text: str) -> Iterator[str]:
    """Yield lines without comments; lines that end with a backslash are joined."""
    for line in re.sub(r"\\\r?\n", " ", text).splitlines():
        content = re.sub(r"(^|\s)#.*", "", line).strip()
        if content:
            yield content


def _require_locked(line: str, path: Path) -> Requirement | None:
    """Return the requirement in a line, which must have a hash; None if the line is an option."""
    if line.startswith(_NOT_WHOLE):
        raise _not_locked(path, line, "name all packages itself, without other files")
    if line.startswith("-"):
        option, _, value = line.replace("=", " ", 1).partition(" ")
        is_relative = "://" not in value and not value.strip().startswith("/")
        if option in ("-f", "--find-links") and is_relative:
            raise _not_locked(path, line, "give folders of wheels as absolute paths or URLs")
        return None
    named, *hashes = line.split("--hash=")
    if not hashes and "#sha256=" not in line:
        raise _not_locked(path, line, "have a hash for each package")
    try:
        return Requirement(named.strip())
    except InvalidRequirement:
        raise _not_locked(path, line, "consist of requirements") from None


def _not_locked(path: Path, line: str, rule: str) -> ConfigError:
    return ConfigError(f"{path} must {rule}", got=line[:120], fix=f"{_FIX}.")


def _require_stoker(requirements: list[Requirement], path: Path) -> None:
    wanted = f"stoker=={stoker.__version__}"
    found = [each for each in requirements if canonicalize_name(each.name) == "stoker"]
    if not found:
        raise ConfigError(
            f"{path} must contain {wanted}, which submits the job",
            got=Plain("no stoker"),
            fix=f"Add it, and make the lock again: {_FIX.partition(': ')[2]}.",
        )
    for each in found:
        version = _version(each)
        if version is not None and version != stoker.__version__:
            raise ConfigError(
                f"{path} must contain {wanted}, which submits the job",
                got=Plain(f"stoker=={version}"),
                fix=f"Submit with Stoker {version}, or make the lock again with this one.",
            )


def _version(requirement: Requirement) -> str | None:
    """Return the version that a requirement pins; None if the requirement does not show the version."""
    if requirement.url is None:
        return next((each.version for each in requirement.specifier if each.operator == "=="), "")
    name = requirement.url.partition("#")[0].rpartition("/")[2]
    try:
        return str(parse_wheel_filename(name)[1])
    except InvalidWheelFilename:
        return None
