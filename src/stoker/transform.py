"""The functions for `preprocessing_fn`, with TensorFlow Transform's names: to switch, change only the import.

import stoker.transform as st

def preprocessing_fn(inputs):
    return {"fare": st.scale_to_z_score(inputs["fare"])}
"""

from __future__ import annotations

from stoker.data.features.preprocessing.numeric import (
    apply_buckets,
    bucketize,
    hash_strings,
    max,  # noqa: A004 - the name in TensorFlow Transform
    mean,
    min,  # noqa: A004 - as `max`
    quantiles,
    scale_by_min_max,
    scale_to_0_1,
    scale_to_z_score,
    var,
)
from stoker.data.features.preprocessing.sparse import sparse_from_lists
from stoker.data.features.preprocessing.tft_arguments import missing_function
from stoker.data.features.preprocessing.vocabularies import (
    apply_vocabulary,
    compute_and_apply_vocabulary,
    make_and_track_object,
    vocabulary,
)
from stoker.data.features.spec import TransformOutput

__all__ = [
    "TransformOutput",
    "apply_buckets",
    "apply_vocabulary",
    "bucketize",
    "compute_and_apply_vocabulary",
    "hash_strings",
    "make_and_track_object",
    "max",
    "mean",
    "min",
    "quantiles",
    "scale_by_min_max",
    "scale_to_0_1",
    "scale_to_z_score",
    "sparse_from_lists",
    "var",
    "vocabulary",
]


def __getattr__(name: str) -> object:
    raise missing_function(name)
