"""What tests compile of C, to stand between a program and its system."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest


def compiled(source: Path, library: Path) -> Path:
    """`source` as the shared library `library`; the test is skipped on a machine without a compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        if os.environ.get("CI") == "true":
            pytest.fail("a C compiler must be there in CI")
        pytest.skip("no C compiler")
    command = [compiler, "-shared", "-fPIC", "-Wall", "-Werror", str(source), "-o", str(library)]
    subprocess.run(command, check=True)
    return library
