"""What the client makes of lists of different lengths before it sends them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.client.rows import Request, padded, to_arrays
from stoker.client.signature import PADDING, SignatureSpec, TensorSpec
from stoker.core.errors import UserError
from stoker.data import columns
from stoker.data.columns import VARYING, Column, list_lengths

VALUES: dict[str, st.SearchStrategy[Any]] = {
    "int64": st.integers(-(2**63) + 1, 2**63 - 1),
    "float32": st.floats(width=32, allow_nan=False),
    "string": st.text(st.characters(exclude_categories=["Cs"]), min_size=1),
}
COLUMNS = {
    dtype: Column(name=dtype, dtype=dtype, length=VARYING)
    for dtype in get_args(columns.Dtype)
    if dtype in columns.PADDING
}
ROWS = st.lists(
    st.fixed_dictionaries({name: st.lists(VALUES[name], max_size=4) for name in COLUMNS}),
    min_size=1,
    max_size=5,
)


def exported(*names: str, without: str = "") -> dict[str, SignatureSpec]:
    """The signatures of a model that Stoker exported with lists of these dtypes."""
    inputs = {name: TensorSpec(dtype=name, shape=(None, None)) for name in names}
    raw, other = SignatureSpec(inputs=inputs, outputs={}), SignatureSpec(inputs={}, outputs={})
    named = {"serving_default": raw, "transform_features": raw}
    named |= {"serving_examples": other, "serving_transformed": other}
    return {name: spec for name, spec in named.items() if name != without}


@given(ROWS)
def test_what_is_padded_is_cut_off_again(rows: list[dict[str, list[Any]]]) -> None:
    known = exported(*COLUMNS)
    by_columns = {name: [row[name] for row in rows] for name in COLUMNS}

    for request in (Request(rows=rows), Request(columns=by_columns)):
        arrays = to_arrays(padded(request, lambda: known), known["serving_default"])
        for name, column in COLUMNS.items():
            assert arrays[name].ndim == 2
            assert list_lengths(column, arrays[name]).tolist() == [len(row[name]) for row in rows]
    assert PADDING.keys() == COLUMNS.keys()


def test_rows_without_names_are_padded_too() -> None:
    known = exported("int64")

    for request in (Request(rows=[[1, 2], [3]]), Request(columns=[[1, 2], [3]])):
        body = padded(request, lambda: known).body
        assert next(iter(body.values())) == [[1, 2], [3, -(2**63)]]


def test_a_server_is_not_queried_about_lists_of_one_length() -> None:
    def signatures() -> Mapping[str, SignatureSpec]:
        raise AssertionError

    for rows in ([{"x": [1, 2]}, {"x": [3, 4]}], [[1], [2]], [1.0, 2.0], [{"b64": "AA=="}]):
        request = Request(rows=rows)
        assert padded(request, signatures) is request


@pytest.mark.parametrize(
    ("known", "signature"),
    [
        (exported("int64", without="serving_examples"), ""),
        (exported("int64", without="transform_features"), ""),
        (exported("float64"), ""),
        (exported("int64") | {"mine": exported("int64")["serving_default"]}, "mine"),
    ],
)
def test_padding_that_the_model_may_not_cut_off_is_an_error(
    known: dict[str, SignatureSpec], signature: str
) -> None:
    name = next(iter(known["serving_default"].inputs))
    rows = [{name: [1, 2]}, {name: [3]}]

    with pytest.raises(UserError, match=f"'{name}' must have rows of the same length.*one row at"):
        padded(Request(rows=rows, signature=signature), lambda: known)
