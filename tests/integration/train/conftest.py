"""A tiny dataset and its transform, made without the stages before them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.integration.train.small import small_dataset

from stoker.data.dataset import Dataset
from stoker.data.features.preprocessing.build import build_transform
from stoker.data.features.preprocessing.transform import Transform
from stoker.train.context import utilization


@pytest.fixture(scope="module", autouse=True)
def brief_ceiling() -> Iterator[None]:
    """Utilization does not matter here, and to measure it takes a second of every training."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utilization, "CEILING_S", 0.02)
        yield


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """`a` and `b` are numbers, `y` is 1 where their sum is positive."""
    return small_dataset(tmp_path_factory.mktemp("dataset"))


@pytest.fixture(scope="session")
def transform(dataset: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Transform:
    """Every column as it is; `y` is the label."""
    return build_transform(dataset, None, tmp_path_factory.mktemp("t") / "transform", label="y")
