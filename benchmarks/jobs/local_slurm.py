"""The Slurm of the tests, for a benchmark: its programs on the PATH of this process, and an empty list of jobs."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.slurm_cluster import Cluster, slurm_cluster


@contextmanager
def local_slurm() -> Iterator[tuple[Cluster, Path]]:
    """Run four machines of a Slurm; yield them and a folder for experiments and runs."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))  # sockets have short paths
    try:
        with slurm_cluster(folder) as cluster:
            for name in ("SLURM_CONF", "PATH"):
                os.environ[name] = cluster.environ[name]
            for name in ("XDG_STATE_HOME", "XDG_CONFIG_HOME"):
                os.environ[name] = str(folder / "home")
            yield cluster, folder
    except pytest.skip.Exception as why:
        raise SystemExit(f"no Slurm here: {why}") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)
