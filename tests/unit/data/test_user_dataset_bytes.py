"""`train.feed` on a dataset of the user's own: the same batches, whatever it says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from tests.dataset_graph import set_to

from stoker.core.errors import ConfigError
from stoker.data.feed.calls import Calls
from stoker.data.feed.config import ByteForm, FeedConfig
from stoker.data.feed.stages import dataset_stages
from stoker.data.user_dataset.analysis import analyze_own_dataset
from stoker.data.user_dataset.config import OwnDatasetConfig, PipelineConfig
from stoker.data.user_dataset.description import SPLITS, Count
from stoker.data.user_dataset.feed import BATCHES_AHEAD, OwnFeed
from stoker.data.user_dataset.load_dataset import open_own_dataset, with_pipeline

ROWS, SIZE = 24, (24, 24, 3)

PIXELS = np.random.default_rng(0).integers(0, 256, (ROWS, *SIZE), np.uint8)

FEATURES: dict[str, Any] = {
    "whole": PIXELS.astype(np.float32),
    "ids": PIXELS.astype(np.int64),
    "of_one": PIXELS.astype(np.float32) / np.float32(255),
    "scaled": PIXELS.astype(np.float32) * np.float32(1 / 255),
    "wide": PIXELS.astype(np.float64) / 255,
    "half": PIXELS.astype(np.float16) / np.float16(255),
    "minus": PIXELS.astype(np.float32) * np.float32(-0.0),
    "halves": PIXELS.astype(np.float32) / 2,
    "below": PIXELS.astype(np.float32) - 1,
    "sent_so": PIXELS,
    "small": np.arange(ROWS, dtype=np.float32)[:, None],
    "name": np.array([f"row {n}" for n in range(ROWS)]),
}

FORMS: dict[str, ByteForm] = {
    "whole": "x",
    "ids": "x",
    "of_one": "x/255",
    "scaled": "x*(1/255)",
    "wide": "x/255",
    "half": "x/255",
}


def dataset(split: str) -> tf.data.Dataset[Any]:
    del split
    rows: Any = (FEATURES, np.arange(ROWS))
    return tf.data.Dataset.from_tensor_slices(rows).batch(5)


def alone(split: str) -> tf.data.Dataset[Any]:
    """One feature without a name."""
    del split
    rows: Any = (FEATURES["of_one"], np.arange(ROWS))
    return tf.data.Dataset.from_tensor_slices(rows).batch(5)


def feed(config: FeedConfig, *, function: Any = dataset, cache: str = "none") -> OwnFeed:
    own = OwnDatasetConfig(
        dataset="model:dataset",
        pipeline=PipelineConfig(cache=cache),  # type: ignore[arg-type]  # one of its words
    )
    made = open_own_dataset(function, own)
    counts = dict.fromkeys(SPLITS, Count(rows=ROWS, batches=5, batch_size=5))
    return OwnFeed(with_pipeline(made, own.pipeline, counts=counts), "train", config=config)


def elements(own: OwnFeed) -> Iterator[Any]:
    """The first pass and a half, as they come and as the step sees them."""
    calls = Calls(rows=25, batch_size=5, steps_per_call=1, seed=0, first=0, last=8)
    with own.shuffled(calls) as batches:
        for element in batches.take(8):
            yield element, own.load(element)


def loaded(config: FeedConfig, **options: Any) -> list[Any]:
    return [batch for _, batch in elements(feed(config, **options))]


@pytest.fixture(scope="module")
def plain() -> list[Any]:
    """The batches of a feed without settings."""
    return loaded(FeedConfig())


@pytest.mark.parametrize(
    "config",
    [
        FeedConfig(threads=1),
        FeedConfig(threads=5, prefetch=3),
        FeedConfig(prefetch=32),
        FeedConfig(autotune=False),
        FeedConfig(slack=True),
        FeedConfig(slack=True, prefetch=2, threads=2),
        FeedConfig(uint8=FORMS),
    ],
    ids=repr,
)
@pytest.mark.parametrize("cache", ["none", "memory"])
def test_however_they_are_made_ready_batches_are_the_same(
    plain: list[Any], config: FeedConfig, cache: str
) -> None:
    found = loaded(config, cache=cache)

    tf.nest.assert_same_structure(plain, found)
    for one, other in zip(tf.nest.flatten(plain), tf.nest.flatten(found), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("cache", ["none", "memory"])
def test_tensorflow_gets_the_settings(cache: str) -> None:
    config = FeedConfig(threads=5, prefetch=3, slack=True, autotune=False)

    configured, plainly = (handed_over(config, cache=cache), handed_over(FeedConfig(), cache=cache))

    assert configured.options().threading.private_threadpool_size == 5
    assert configured.options().experimental_slack
    assert not configured.options().autotune.enabled
    assert set_to(configured, "PrefetchDataset", 1)[-1:] == [3]
    assert plainly.options().threading.private_threadpool_size is None
    assert not plainly.options().experimental_slack
    assert plainly.options().autotune.enabled == (cache == "none"), "a pass from memory needs none"
    assert 3 not in set_to(plainly, "PrefetchDataset", 1)


@pytest.mark.parametrize("buffer", [tf.data.AUTOTUNE, 7], ids=["autotuned", "7"])
@pytest.mark.parametrize("autotune", [True, False], ids=["tuned", "as written"])
def test_a_last_prefetch_stays_unless_tensorflow_has_one_of_its_own_behind_it(
    *, plain: list[Any], autotune: bool, buffer: int
) -> None:
    def prefetched(split: str) -> tf.data.Dataset[Any]:
        return dataset(split).prefetch(buffer)

    own = feed(FeedConfig(autotune=autotune), function=prefetched)
    calls = Calls(rows=25, batch_size=5, steps_per_call=1, seed=0, first=0, last=8)

    with own.shuffled(calls) as batches:
        written = set_to(batches, "PrefetchDataset", 1)

    # TensorFlow adds one of its own after all passes if it tunes them.
    by_tensorflow = autotune and buffer == tf.data.AUTOTUNE
    assert written == ([] if by_tensorflow else [buffer])
    for one, other in zip(loaded(FeedConfig(), function=prefetched), plain, strict=True):
        tf.nest.map_structure(np.testing.assert_array_equal, one, other)


@pytest.mark.parametrize("turned_off", ["in stoker.yaml", "by the dataset"])
@pytest.mark.parametrize("own", [None, 7], ids=["no prefetch of its own", "one of its own"])
def test_where_tensorflow_tunes_nothing_a_dataset_without_a_prefetch_gets_one(
    *, own: int | None, turned_off: str
) -> None:
    def made(split: str) -> tf.data.Dataset[Any]:
        options = tf.data.Options()
        options.autotune.enabled = turned_off != "by the dataset"
        written = dataset(split)
        return (written if own is None else written.prefetch(own)).with_options(options)

    read = feed(FeedConfig(autotune=turned_off == "by the dataset"), function=made)
    calls = Calls(rows=25, batch_size=5, steps_per_call=1, seed=0, first=0, last=8)

    with read.shuffled(calls) as batches:
        assert not batches.options().autotune.enabled
        assert set_to(batches, "PrefetchDataset", 1) == [BATCHES_AHEAD if own is None else own]


def handed_over(config: FeedConfig, *, cache: str) -> tf.data.Dataset[Any]:
    calls = Calls(rows=25, batch_size=5, steps_per_call=1, seed=0, first=0, last=8)
    with feed(config, cache=cache).shuffled(calls) as batches:
        return batches


def test_what_is_named_is_kept_and_handed_over_as_bytes() -> None:
    element, _ = next(elements(feed(FeedConfig(uint8={"whole": "x", "of_one": "x/255"}))))

    kinds = {name: tensor.dtype.name for name, tensor in element[0].items()}
    assert (kinds["whole"], kinds["of_one"]) == ("uint8", "uint8")
    assert (kinds["ids"], kinds["small"], kinds["name"]) == ("int64", "float32", "string")


def test_a_feature_without_a_name_is_sent_as_bytes_too() -> None:
    config = FeedConfig(uint8={"inputs": "x/255"})

    element, batch = next(elements(feed(config, function=alone)))

    assert element[0]["inputs"].dtype == tf.uint8
    np.testing.assert_array_equal(batch[0]["inputs"], FEATURES["of_one"][:5])


@pytest.mark.parametrize("jit_compile", [False, True])
def test_a_compiled_step_sees_what_they_were_to_the_last_bit(*, jit_compile: bool) -> None:
    own = feed(FeedConfig(uint8=FORMS))
    element, _ = next(elements(own))
    features = {name: element[0][name] for name in FORMS}

    made = tf.function(
        lambda parts: {
            name: own.load(({**element[0], **parts}, element[1]))[0][name] for name in FORMS
        },
        jit_compile=jit_compile,
        autograph=False,
    )(features)

    for name in FORMS:
        np.testing.assert_array_equal(made[name], FEATURES[name][:5], err_msg=name)


@pytest.mark.parametrize("name", ["halves", "below", "minus", "of_one"])
def test_another_number_ends_the_run_and_is_named(name: str) -> None:
    own = feed(FeedConfig(uint8={name: "x"}))

    with pytest.raises(
        tf.errors.InvalidArgumentError,
        match=f"the feature .{{1,2}}{name}.{{1,2}} must be x of a whole number",
    ):
        list(elements(own))


def test_not_a_number_ends_the_run_too() -> None:
    def broken(split: str) -> tf.data.Dataset[Any]:
        return dataset(split).map(
            lambda features, label: ({**features, "whole": features["whole"] * np.nan}, label)
        )

    own = feed(FeedConfig(uint8={"whole": "x"}), function=broken)

    with pytest.raises(tf.errors.InvalidArgumentError, match="must be x of a whole number"):
        list(elements(own))


@pytest.mark.parametrize(
    ("forms", "said"),
    [
        ({"picture": "x"}, "must name features of the dataset, not 'picture'"),
        ({"name": "x"}, "the feature 'name' must have a type that x can have"),
        ({"ids": "x/255"}, "the feature 'ids' must have a type that x/255 can have"),
    ],
)
def test_what_cannot_be_sent_as_bytes_is_refused(forms: dict[str, ByteForm], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        feed(FeedConfig(uint8=forms))


def found_bytes(function: Any, folder: Path) -> dict[str, ByteForm]:
    made = open_own_dataset(function, OwnDatasetConfig(dataset="model:dataset"))
    (scratch := folder / "scratch").mkdir()
    found = analyze_own_dataset(
        made, folder, scratch=scratch, fingerprint="f", progress=lambda *_: None
    )
    return found.byte_forms


def test_what_could_be_sent_as_bytes_is_found(tmp_path: Path) -> None:
    assert found_bytes(dataset, tmp_path) == FORMS


@pytest.mark.parametrize(
    ("make", "form"),
    [
        (lambda x: tf.cast(x, tf.float32) / 255.0, "x/255"),
        (keras.layers.Rescaling(1 / 255), "x*(1/255)"),
        (lambda x: tf.image.convert_image_dtype(x, tf.float32), "x*(1/255)"),
        (keras.layers.Rescaling(1 / 127.5, offset=-1), None),
    ],
    ids=["divided", "Rescaling", "convert_image_dtype", "from -1 to 1"],
)
def test_the_ways_in_which_pixels_are_scaled_are_known(
    make: Any, form: str | None, tmp_path: Path
) -> None:
    def scaled(split: str) -> tf.data.Dataset[Any]:
        del split
        rows = tf.data.Dataset.from_tensor_slices((PIXELS, np.arange(ROWS))).batch(5)
        return rows.map(lambda x, y: (make(x), y))

    assert found_bytes(scaled, tmp_path) == ({} if form is None else {"inputs": form})


@pytest.mark.parametrize("where", ["eval", "late"])
def test_one_value_in_all_splits_tells_that_a_feature_is_not_bytes(
    where: str, tmp_path: Path
) -> None:
    def one_other(split: str) -> tf.data.Dataset[Any]:
        pixels = FEATURES["of_one"].copy()
        if split == "eval" or where == "late":
            pixels[-1, 0, 0, 0] = 0.5
        rows: Any = (pixels, np.arange(ROWS))
        return tf.data.Dataset.from_tensor_slices(rows).batch(5)

    assert found_bytes(one_other, tmp_path) == {}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"threads": 0}, "train.feed.threads must be from 1 to 1,024"),
        ({"prefetch": 10**6}, "train.feed.prefetch must be from 1 to 100,000"),
        ({"parallel_batches": -1}, "train.feed.parallel_batches must be"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        FeedConfig(**settings)


@pytest.mark.parametrize("function", ["as set", "by the user"])
def test_stages_are_known_without_the_autotuner_too(function: str) -> None:
    def plain(split: str) -> tf.data.Dataset[Any]:
        options = tf.data.Options()
        options.autotune.enabled = False
        return dataset(split).with_options(options)

    own = (
        feed(FeedConfig(autotune=False))
        if function == "as set"
        else feed(FeedConfig(), function=plain)
    )

    assert [stage.name for stage in dataset_stages(own.watched(), elements=4)]
    with own.shuffled(
        Calls(rows=25, batch_size=5, steps_per_call=1, seed=0, first=0, last=8)
    ) as batches:
        assert not batches.options().autotune.enabled
