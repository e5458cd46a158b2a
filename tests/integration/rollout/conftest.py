"""The rollout benchmark's modules lie in no package: they are found by their folder."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.rollout.rest_site import Site, site

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks" / "rollout"))


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A server with API keys."""
    yield from site(tmp_path_factory.mktemp("guarded"), keys=True)


@pytest.fixture(scope="module")
def open_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A server without API keys."""
    yield from site(tmp_path_factory.mktemp("open"), keys=False)
