"""What tests of several rooms share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.integration.train.killed import Trainer


@pytest.fixture(scope="module")
def in_soak(request: pytest.FixtureRequest) -> bool:
    """Whether a selected test of the module is marked `soak`: then its fixtures run everything."""
    return any(
        item.path == request.path and item.get_closest_marker("soak") is not None
        for item in request.session.items
    )


@pytest.fixture(scope="session")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    """Starts commands in processes of their own; TensorFlow is imported once for all of them."""
    from tests.integration.train.killed import Trainer

    trainer = Trainer(tmp_path_factory.mktemp("log") / "said.txt")
    yield trainer
    trainer.close()
