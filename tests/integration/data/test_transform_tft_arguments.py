"""A preprocessing_fn written for TensorFlow Transform runs, or its error names what is missing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

import stoker.transform as st
from stoker.core.errors import ConfigError
from stoker.data.dataset import Dataset
from stoker.data.features.preprocessing.build import build_transform
from stoker.data.features.preprocessing.tft_arguments import _MISSING
from stoker.data.ingest import IngestConfig, ingest

PAGE = Path(__file__).resolve().parents[3] / "docs" / "reference" / "transform.md"

PUBLIC_IN_1_21 = [
    "annotate_asset",
    "apply_buckets",
    "apply_buckets_with_interpolation",
    "apply_pyfunc",
    "apply_vocabulary",
    "bag_of_words",
    "bucketize",
    "bucketize_per_key",
    "compute_and_apply_vocabulary",
    "count_per_key",
    "covariance",
    "DatasetMetadata",
    "deduplicate_tensor_per_row",
    "estimated_probability_density",
    "get_analyze_input_columns",
    "get_num_buckets_for_transformed_feature",
    "get_transform_input_columns",
    "hash_strings",
    "histogram",
    "make_and_track_object",
    "max",
    "mean",
    "min",
    "ngrams",
    "pca",
    "quantiles",
    "scale_by_min_max",
    "scale_by_min_max_per_key",
    "scale_to_0_1",
    "scale_to_0_1_per_key",
    "scale_to_gaussian",
    "scale_to_z_score",
    "scale_to_z_score_per_key",
    "segment_indices",
    "size",
    "sparse_tensor_left_align",
    "sparse_tensor_to_dense_with_shape",
    "sum",
    "tfidf",
    "TFTransformOutput",
    "TransformFeaturesLayer",
    "tukey_h_params",
    "tukey_location",
    "tukey_scale",
    "var",
    "vocabulary",
    "word_count",
]
"""`__all__` of tensorflow_transform 1.21."""


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp("tft")
    rows = "".join(f"{row},{row / 7:.3f},{'abc'[row % 3]},{row % 2}\n" for row in range(90))
    (folder / "data.csv").write_text("key,x,word,y\n" + rows)
    config = IngestConfig(source=str(folder / "data.csv"), split_by="key")
    return ingest(config, folder / "out", label="y")


def features(
    dataset: Dataset, folder: Path, functions: Mapping[str, Callable[..., Any]]
) -> dict[str, Any]:
    """Name -> what its function gives on three rows."""

    def preprocessing_fn(inputs: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        return {name: function(inputs) for name, function in functions.items()}

    transform = build_transform(dataset, preprocessing_fn, folder, label="y")
    raw = {"x": tf.constant([0.0, 5.5, 12.0]), "word": tf.constant(["a", "b", "zz"])}
    needed = {c.name: raw[c.name] for c in transform.serving_columns}
    return {name: f.numpy().tolist() for name, f in transform.apply_features(needed).items()}


FULL = {
    "quantiles": lambda i: i["x"] - st.quantiles(i["x"], 4, 0.01)[0, 0],
    "bucketize": lambda i: st.bucketize(i["x"], 4, epsilon=0.01, weights=None, name="b"),
    "z_score": lambda i: st.scale_to_z_score(i["x"], elementwise=False, name="z"),
    "min_max": lambda i: st.scale_by_min_max(i["x"], -1.0, 1.0, False, "m"),
    "mean": lambda i: i["x"] - st.mean(i["x"], reduce_instance_dims=True, name="mean"),
    "vocabulary": lambda i: st.compute_and_apply_vocabulary(
        i["word"],
        top_k=2,
        num_oov_buckets=1,
        weights=None,
        store_frequency=False,
        file_format="text",
        name="v",
    ),
    "hash": lambda i: st.hash_strings(i["word"], 10, None, "h"),
}
PLAIN = {
    "quantiles": lambda i: i["x"] - st.quantiles(i["x"], 4)[0, 0],
    "bucketize": lambda i: st.bucketize(i["x"], 4),
    "z_score": lambda i: st.scale_to_z_score(i["x"]),
    "min_max": lambda i: st.scale_by_min_max(i["x"], output_min=-1.0, output_max=1.0),
    "mean": lambda i: i["x"] - st.mean(i["x"]),
    "vocabulary": lambda i: st.compute_and_apply_vocabulary(i["word"], top_k=2, num_oov_buckets=1),
    "hash": lambda i: st.hash_strings(i["word"], hash_buckets=10),
}


def test_tensorflow_transforms_harmless_arguments_change_nothing(
    dataset: Dataset, tmp_path: Path
) -> None:
    full = features(dataset, tmp_path / "full", FULL)

    assert full == features(dataset, tmp_path / "plain", PLAIN)
    assert full.keys() == FULL.keys()


@pytest.mark.parametrize(
    ("function", "argument"),
    [
        (lambda i: st.scale_to_z_score(i["x"], elementwise=True), "elementwise=False"),
        (lambda i: st.mean(i["x"], reduce_instance_dims=False), "reduce_instance_dims=True"),
        (lambda i: st.bucketize(i["x"], 4, weights=i["x"]), "weights=None"),
        (
            lambda i: st.compute_and_apply_vocabulary(i["word"], weights=i["x"]),
            "weights=None",
        ),
        (lambda i: st.vocabulary(i["word"], key_fn=str), "key_fn=None"),
        (lambda i: st.quantiles(i["x"], 4, bins=3), "bins"),
    ],
)
def test_an_argument_that_would_change_the_result_is_refused_by_name(
    function: Callable[..., Any], argument: str, dataset: Dataset, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as refused:
        features(dataset, tmp_path / "t", {"f": function})

    assert argument in refused.value.line()


def test_every_public_name_is_here_or_says_what_to_use_instead() -> None:
    for name in PUBLIC_IN_1_21:
        if name in st.__all__:
            assert callable(getattr(st, name))
        else:
            with pytest.raises(ConfigError, match=name) as missing:
                getattr(st, name)
            assert missing.value.fix
            assert not hasattr(st, name)
    assert set(_MISSING) == set(PUBLIC_IN_1_21) - set(st.__all__)


def test_an_unknown_name_is_a_plain_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'scale_to_moon'"):
        _ = st.scale_to_moon


def test_the_page_names_every_function() -> None:
    page = PAGE.read_text()

    assert [name for name in PUBLIC_IN_1_21 if f"`{name}" not in page] == []
