"""Each analyzer against its meaning in NumPy and plain Python, for any data."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

import ibis
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.data.features import analyzers
from stoker.data.features.spec import escaped, unescaped

FLOATS = st.lists(
    st.floats(-1e6, 1e6, width=32) | st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -0.0]),
    min_size=1,
    max_size=60,
)
TEXTS = st.lists(
    st.sampled_from(["a", "b", "B", "é", "", "x\ny", "x\ry", "two words", "\x00"]), max_size=60
)
QUICK = settings(max_examples=40, deadline=None)


@pytest.fixture(scope="module", autouse=True)
def backend() -> object:
    backend = ibis.duckdb.connect(threads=1)
    ibis.set_backend(backend)
    return backend


def table(values: Sequence[object], dtype: pa.DataType) -> ibis.expr.types.Table:
    return ibis.memtable(pa.table({"value": pa.array(list(values), dtype)}))


@QUICK
@given(FLOATS)
def test_moments_are_those_of_the_finite_values(values: list[float]) -> None:
    found = analyzers.moments(table(values, pa.float32()))
    finite = np.array([v for v in values if math.isfinite(v)], np.float64)

    assert found.count == len(finite)
    if len(finite):
        assert found.mean == pytest.approx(finite.mean(), rel=1e-9, abs=1e-9)
        assert found.var == pytest.approx(finite.var(), rel=1e-9, abs=1e-9)
        assert (found.low, found.high) == (finite.min(), finite.max())
    else:
        assert found == analyzers.Moments(count=0, mean=0.0, var=0.0, low=0.0, high=0.0)


@QUICK
@given(FLOATS, st.integers(1, 4))
def test_moments_joined_by_rows_are_those_of_all_values(values: list[float], width: int) -> None:
    rows = np.resize(np.array(values, np.float32), (len(values), width))
    partial = ibis.memtable(pa.table(dict(analyzers.row_moments(rows).items())))
    flat = [float(value) for value in rows.ravel()]

    joined = analyzers.moments(partial)
    direct = analyzers.moments(table(flat, pa.float32()))

    assert joined.count == direct.count
    assert (joined.low, joined.high) == (direct.low, direct.high)
    assert joined.mean == pytest.approx(direct.mean, rel=1e-9, abs=1e-9)
    assert joined.var == pytest.approx(direct.var, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("value", [0.1, 1e300, -7.0])
def test_equal_values_have_no_variance_at_all(value: float) -> None:
    found = analyzers.moments(table([value] * 1001, pa.float64()))

    assert found.is_constant
    assert (found.mean, found.var) == (value, 0.0)


@QUICK
@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=30), st.integers(2**53, 2**63 - 99))
def test_moments_of_integers_beyond_float64_are_exact(values: list[int], first: int) -> None:
    for numbers in (values, [first + place for place in range(len(values))]):
        found = analyzers.moments(table(numbers, pa.int64()))

        assert found.count == len(numbers)
        if numbers:
            mean = Fraction(sum(numbers), len(numbers))
            var = float(sum((number - mean) ** 2 for number in numbers) / len(numbers))
            assert float(found.mean) == pytest.approx(float(mean), rel=1e-12)
            assert found.var == pytest.approx(var, rel=1e-9)
            assert (found.low, found.high) == (min(numbers), max(numbers))


@pytest.mark.parametrize(
    ("num_buckets", "boundaries"),
    [(2, [3]), (3, [2, 3]), (4, [2, 3, 4]), (5, [1, 2, 3, 4]), (6, [1, 2, 3, 3, 4]),
     (10, [1, 1, 2, 2, 3, 3, 3, 4, 4])],
)  # fmt: skip
def test_quantiles_are_those_of_tensorflow_transforms_tests(
    num_buckets: int, boundaries: list[int]
) -> None:
    assert analyzers.quantiles(table([4, 2, 3, 1], pa.int64()), num_buckets) == boundaries


@QUICK
@given(FLOATS, st.integers(1, 12))
def test_quantiles_are_the_sorted_values_at_equal_steps(
    values: list[float], num_buckets: int
) -> None:
    finite = sorted(v for v in values if math.isfinite(v))
    found = analyzers.quantiles(table(values, pa.float32()), num_buckets)

    steps = range(1, num_buckets)
    assert found == ([finite[i * len(finite) // num_buckets] for i in steps] if finite else [])
    assert all(math.copysign(1, value) > 0 for value in found if value == 0)


@QUICK
@given(TEXTS, st.none() | st.integers(0, 4), st.none() | st.integers(0, 5))
def test_vocabulary_is_by_falling_frequency_then_falling_term(
    values: list[str], top_k: int | None, threshold: int | None
) -> None:
    found = analyzers.vocabulary(
        table(values, pa.string()), top_k=top_k, frequency_threshold=threshold
    )
    counts = Counter(v.encode() for v in values if v)
    often = [term for term in counts if counts[term] >= (threshold or 0)]
    expected = sorted(often, key=lambda term: (counts[term], term), reverse=True)[:top_k]

    assert found == (expected or [analyzers.EMPTY_VOCABULARY_TOKEN])


@given(st.binary())
def test_a_term_with_line_ends_is_one_line_of_the_file_and_reads_back(term: bytes) -> None:
    line = escaped(term)

    assert b"\n" not in line
    assert b"\r" not in line
    assert unescaped(line) == term


def test_vocabulary_of_integers_breaks_ties_as_text() -> None:
    found = analyzers.vocabulary(
        table([10, 9, 9, 10, 7], pa.int64()), top_k=None, frequency_threshold=None
    )

    assert found == [b"9", b"10", b"7"]


def test_vocabulary_of_bytes_that_are_not_text_is_kept() -> None:
    found = analyzers.vocabulary(
        table([b"\xff", b"\xff", b"a"], pa.binary()), top_k=None, frequency_threshold=None
    )

    assert found == [b"\xff", b"a"]


def test_classes_are_sorted_by_their_bytes() -> None:
    assert analyzers.classes(table(["b", "é", "", "Z", "b"], pa.string())) == [
        b"Z",
        b"b",
        "é".encode(),
    ]


def test_range_keeps_wide_integers_exact() -> None:
    values = [2**62 + 1, -(2**62) - 1, 0]

    found = analyzers.value_range(table(values, pa.int64()))

    assert found == (-(2**62) - 1, 2**62 + 1)


def test_range_leaves_nan_out_and_keeps_infinities() -> None:
    rows = np.array([[math.nan, 1.0], [math.nan, math.nan], [math.inf, 2.0]])
    partial = ibis.memtable(pa.table(dict(analyzers.row_range(rows).items())))
    nothing = table([math.nan, None], pa.float64())

    assert analyzers.value_range(partial) == (1.0, math.inf)
    assert all(map(math.isnan, analyzers.value_range(nothing)))
