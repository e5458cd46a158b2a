"""A lock of one small wheel by hand: a `stoker` that counts instead of training, for environments that uv makes in a second."""

from __future__ import annotations

import hashlib
import shutil
import sys
import zipfile
from pathlib import Path

import pytest

import stoker

TOOLS = Path(__file__).resolve().parents[1] / ".tools" / "bin"
SOURCE = Path(stoker.__file__).parent
COUNTING = Path(__file__).parent / "integration" / "jobs" / "counting_job.py"

OF_STOKER = (
    *("core/__init__.py", "core/errors.py", "jobs/__init__.py", "jobs/providers/__init__.py"),
    *("jobs/providers/slurm/__init__.py", "jobs/providers/slurm/worker.py"),
)
"""What starts a worker is Stoker's own."""

MAIN = """
import os, sys
from pathlib import Path
from stoker.counting import main

rank = os.environ.get("SLURM_PROCID", "0")
Path(sys.argv[2], f"prefix-{sys.argv[1]}-{rank}").write_text(sys.prefix)
sys.exit(main(sys.argv[1:]))
"""


PYTHON_FOLDER = Path(sys.base_prefix) / "bin"
"""On a PATH uv finds here a Python of this version, where `make setup PYTHON=...` named one that is on no PATH."""


def uv_folder() -> Path:
    """The folder of uv, which `make` installs."""
    found = shutil.which("uv", path=str(TOOLS)) or shutil.which("uv")
    if found is None:
        pytest.skip("no uv: `make setup` installs it")
    return Path(found).parent


def small_wheel(folder: Path, version: str = stoker.__version__) -> str:
    """Write the wheel, and return its line of a lock."""
    path = folder / f"stoker-{version}-py3-none-any.whl"
    info = f"stoker-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        for name in OF_STOKER:
            wheel.write(SOURCE / name, f"stoker/{name}")
        wheel.writestr("stoker/__init__.py", "")
        wheel.writestr("stoker/__main__.py", MAIN)
        wheel.write(COUNTING, "stoker/counting.py")
        wheel.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: stoker\nVersion: {version}\n"
        )
        wheel.writestr(
            f"{info}/WHEEL",
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        wheel.writestr(f"{info}/RECORD", "")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return f"stoker=={version} --hash=sha256:{digest}"


def small_lock(folder: Path, *lines: str) -> Path:
    """Write a lock of the wheel, which lies next to it, and of further lines; return it."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = folder / "requirements.lock"
    head = ["--no-index", f"--find-links {folder}", small_wheel(folder)]
    lock.write_text("\n".join([*head, *lines]) + "\n")
    return lock
