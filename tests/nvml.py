"""A driver for tests: the compiled stand-in for NVML, and the file that controls it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.compiled import compiled

SOURCE = Path(__file__).parent / "integration" / "cluster" / "nvml_stand_in.c"

_HIDDEN = "CUDA_VISIBLE_DEVICES"
"""Set by conftest.py: no test may use a GPU by accident."""


def driver_folder(folder: Path) -> Path:
    """Put a libnvidia-ml.so.1 into a folder."""
    compiled(SOURCE, folder / "libnvidia-ml.so.1")
    return folder


def set_state(file: Path, **numbers: int) -> None:
    """Replace what the driver answers from now on; without numbers, two GPUs, of which the second is unwell."""
    new = file.with_name(f"{file.name}.new")
    new.write_text("".join(f"{key} {number}\n" for key, number in numbers.items()))
    new.replace(file)


def environment(driver: Path | None, state: Path, **more: str) -> dict[str, str]:
    """The environment of a process with this driver; None: a machine without one."""
    kept = {name: value for name, value in os.environ.items() if name != _HIDDEN}
    library = {} if driver is None else {"LD_LIBRARY_PATH": str(driver)}
    return kept | library | {"NVML_STATE": str(state)} | more


def run_python(script: str, environ: dict[str, str]) -> str:
    """What a script prints."""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def samples(text: str) -> dict[str, float]:
    """NAME{LABELS} -> value of an exposition."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}
