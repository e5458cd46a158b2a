"""What is refused while the source is read, and not an hour later."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from stoker.app.chain import run_chain
from stoker.app.experiment import load_experiment
from stoker.core.errors import ConfigError, DataError
from stoker.data.dataset import load_dataset

from .conftest import Recorder

YAML = """\
name: early
data: {source: data}
model: model:build
label: bought
"""


class Watcher(Recorder):
    """A listener that does something in the moment when a stage's key is known and its work begins."""

    def __init__(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.meanwhile = meanwhile

    def stage_began(self, stage: str) -> None:
        if stage == "ingest":
            self.meanwhile()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    (tmp_path / "stoker.yaml").write_text(YAML)
    (tmp_path / "model.py").write_text("def build(features):\n    raise RuntimeError\n")
    for part in range(20):
        rows = "".join(f"{part}.{row},{row % 2}\n" for row in range(50))
        (tmp_path / "data" / f"part-{part:02d}.csv").write_text(f"age,bought\n{rows}")
    return tmp_path


def ingested(folder: Path, *overrides: str, meanwhile: Callable[[], None] = lambda: None) -> Path:
    experiment = load_experiment(folder, overrides=overrides)
    return run_chain(experiment, Watcher(meanwhile), until="ingest").output("ingest")


def rewrite(path: Path) -> None:
    path.write_text(path.read_text().replace("19.", "91."))


def test_a_file_changed_after_its_hash_and_before_it_is_read_is_not_part_of_that_key(
    folder: Path,
) -> None:
    last = folder / "data" / "part-19.csv"

    with pytest.raises(DataError, match=r"part-19\.csv must not change while it is read"):
        ingested(folder, meanwhile=lambda: rewrite(last))
    assert not list(folder.rglob("manifest.json"))

    ages = load_dataset(ingested(folder)).table("train", columns=["age"])["age"].to_pylist()
    assert max(ages) > 91


def test_a_file_added_after_the_hash_waits_for_the_next_run(folder: Path) -> None:
    added = folder / "data" / "part-99.csv"

    first = load_dataset(ingested(folder, meanwhile=lambda: one_row(added)))

    assert sum(first.rows(split) for split in first.splits) == 1000
    second = load_dataset(ingested(folder))
    assert sum(second.rows(split) for split in second.splits) == 1001


def one_row(path: Path) -> None:
    path.write_text("age,bought\n1.5,1\n")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("label=bougth", r"label must be a column.* Did you mean 'bought'\?"),
        ("train.augment.flip=0.5", r"train\.augment needs a column of images"),
    ],
)
def test_what_no_column_can_serve_is_refused_before_a_shard_is_written(
    folder: Path, override: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        ingested(folder, override)
    assert not list(folder.rglob("*.parquet"))


def test_a_label_that_preprocessing_makes_is_not_a_column(folder: Path) -> None:
    assert ingested(folder, "label=made", "preprocessing=model:build").is_dir()


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        (
            "model=model:biuld",
            "model names a function of model.py. Received: 'biuld'. Did you mean",
        ),
        ("model=modle:build", "model names a module of "),
        ("preprocessing=model:prepare", "preprocessing names a function of model.py"),
        ("train.callbacks=model:callbacks", "train.callbacks names a function of model.py"),
    ],
)
def test_missing_code_is_reported_before_anything_is_read(
    folder: Path, setting: str, said: str
) -> None:
    experiment = load_experiment(folder, overrides=[setting])

    with pytest.raises(ConfigError) as caught:
        run_chain(experiment, Watcher(lambda: pytest.fail("ingest had begun")))

    assert said in caught.value.line()


def test_data_can_be_read_before_the_model_is_written(folder: Path) -> None:
    (folder / "model.py").unlink()

    assert load_dataset(ingested(folder)).rows("train")
