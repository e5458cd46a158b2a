"""A file system of a few MiB, which a test can fill."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def mounted(folder: Path, *, size: str) -> Iterator[str]:
    """Mount it on a folder inside the block, if this machine allows it.

    Yields:
        Why it is not mounted; empty if it is.
    """
    if os.geteuid() != 0:
        yield "mounting a small file system needs root"
        return
    folder.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True)
    if done.returncode:
        yield f"no tmpfs here: {done.stderr.decode().strip()}"
        return
    try:
        yield ""
    finally:
        # Lazy: a process of a job may still have its current folder there.
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
