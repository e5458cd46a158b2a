"""The recipe `naive`: slow as a first script is, and right."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from PIL import Image

from stoker.app.chain import ChainResult, StageOutcome, run_chain
from stoker.app.experiment import Experiment, load_experiment
from stoker.app.smoke_test import smoke_test
from stoker.app.stage_outputs import open_dataset
from stoker.data.feed.stages import bottleneck, dataset_stages
from stoker.data.user_dataset.feed import passes_agree
from stoker.data.user_dataset.load_dataset import OwnDataset

pytestmark = pytest.mark.soak

RECIPE = Path(__file__).resolve().parents[3] / "recipes" / "naive"


class Silent:
    """Keeps what was done."""

    def __init__(self) -> None:
        self.worked: list[str] = []

    def log(self, line: str) -> None: ...

    def stage_began(self, stage: str) -> None: ...

    def progress(self, line: str, share: float | None) -> None: ...

    def stage_ended(self, outcome: StageOutcome) -> None:
        if not outcome.skipped:
            self.worked.append(outcome.stage)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Experiment, ChainResult]:
    """A copy of the recipe, run for fewer epochs than its own."""
    folder = tmp_path_factory.mktemp("recipe") / "naive"
    ignored = shutil.ignore_patterns("runs", "models", "data", "__pycache__")
    shutil.copytree(RECIPE, folder, ignore=ignored)
    experiment = load_experiment(folder, overrides=["train.epochs=3"])
    return experiment, run_chain(experiment, Silent())


def test_it_reaches_its_gate_and_is_served(finished: tuple[Experiment, ChainResult]) -> None:
    experiment, chain = finished

    assert chain.results["evaluate"]["metrics"]["accuracy"] >= 0.9
    assert chain.results["evaluate"]["rows"] == 359
    proof = smoke_test(experiment, chain)
    assert len(proof.answers) == 5
    assert all(answer.rest == answer.grpc for answer in proof.answers)


def test_its_images_are_made_once_and_it_is_done_when_they_are(
    finished: tuple[Experiment, ChainResult],
) -> None:
    experiment, _ = finished
    files = sorted((experiment.folder / "data").glob("*/*/*.jpg"))
    assert len(files) == 1797
    with Image.open(files[0]) as image:
        assert (image.format, image.mode, image.size) == ("JPEG", "RGB", (256, 256))
    made_ns = [path.stat().st_mtime_ns for path in files]

    again = Silent()
    run_chain(experiment, again, until="evaluate")

    assert again.worked == []
    assert [path.stat().st_mtime_ns for path in files] == made_ns


def test_it_is_what_it_is_for_a_generator_in_one_thread_holds_it_up(
    finished: tuple[Experiment, ChainResult],
) -> None:
    experiment, chain = finished
    dataset = open_dataset(experiment, chain.output("ingest"), analysis=chain.results["analyze"])
    assert isinstance(dataset, OwnDataset)
    train = dataset.datasets["train"]

    spec: Any = train.element_spec
    pixels, _ = spec
    assert (pixels.dtype, pixels.shape[1:]) == (tf.float32, (48, 48, 3))
    assert dataset.counts["train"].batch_size == 32
    assert bottleneck(dataset_stages(train, elements=6)).name == "Generator"
    assert passes_agree(train, batches=2)
