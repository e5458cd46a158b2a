"""Tests on a GPU: every command runs in a separate process, as a user starts it.

`make test-gpu` runs them on a card. With STOKER_GPU_TESTS_ON_CPU=1 (`make test-gpu DEVICE=cpu`) the CPU is
used instead: that shows that the tests run, and not what a GPU does.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks" / "gpu"))

from children import Children  # noqa: E402 - the suite's process starter, which is in no package
from tests.gpu import pictures as written  # noqa: E402 - as above

Device = Literal["gpu", "cpu"]


@pytest.fixture(scope="session")
def device() -> Device:
    """`gpu`, or `cpu` if the CPU is used instead."""
    return "cpu" if os.environ.get("STOKER_GPU_TESTS_ON_CPU") == "1" else "gpu"


@pytest.fixture(scope="session")
def children(device: Device, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Children]:
    """Starts commands."""
    started = Children(folder=tmp_path_factory.mktemp("output"), forked=device == "cpu")
    yield started
    started.close()


@pytest.fixture(scope="session")
def pictures(
    device: Device, children: Children, tmp_path_factory: pytest.TempPathFactory
) -> written.Pictures:
    """A small image experiment whose data is ingested already."""
    folder = tmp_path_factory.mktemp("pictures")
    made = written.write(folder, children=children, on_gpu=device == "gpu")
    made.ingest()
    return made
