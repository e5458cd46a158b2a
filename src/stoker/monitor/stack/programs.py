"""Finds Prometheus and Alertmanager on the PATH, and checks that their versions can read the generated files."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass

from stoker.core.errors import ConfigError, Plain

_VERSION = re.compile(r"version (\d+)\.(\d+)")
_TIMEOUT_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """Requirements of one program."""

    name: str

    names: tuple[str, ...]
    """Its possible file names, in the order in which they are tried; Debian uses a name of its own."""

    package: str
    """Name of its Debian package."""

    min_version: tuple[int, int]
    """Minimum version."""

    below: int
    """First major version that is not supported."""

    why: str
    """The setting that needs the minimum version."""


PROMETHEUS = Program(
    name="Prometheus",
    names=("prometheus",),
    package="prometheus",
    min_version=(2, 42),
    below=4,
    why="keep_firing_for",
)
ALERTMANAGER = Program(
    name="Alertmanager",
    names=("alertmanager", "prometheus-alertmanager"),
    package="prometheus-alertmanager",
    min_version=(0, 24),
    below=1,
    why="api_url_file",
)


def find_program(program: Program) -> str:
    """Return the path of a program.

    Raises:
        ConfigError: The program is not on the PATH, does not run, or has an unsupported version.
    """
    install = f"apt-get install {program.package}, or put {program.names[0]} on the PATH."
    path = next((there for name in program.names if (there := shutil.which(name))), None)
    if path is None:
        raise ConfigError(
            f"{program.name} must be installed",
            got=Plain(f"no {' or '.join(program.names)} on the PATH"),
            fix=install,
        )
    try:
        done = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
        printed = done.stdout + done.stderr
    except (OSError, subprocess.TimeoutExpired) as error:
        printed = str(error)
    found = _VERSION.search(printed)
    version = (int(found[1]), int(found[2])) if found else (0, 0)
    if found is None or not program.min_version <= version < (program.below, 0):
        minimum = ".".join(map(str, program.min_version))
        raise ConfigError(
            f"{program.name} must be version {minimum} or newer ({program.why}), and below {program.below}",
            got=Plain(f"{path}: {' '.join(printed.split())[:80] or 'nothing'}"),
            fix=f"Install such a version: {install}",
        )
    return path
