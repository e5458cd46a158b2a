from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as numpy_st
from numpy.typing import NDArray

from stoker.core.errors import DataError, UserError
from stoker.train.checkpoints.identity import require_same
from stoker.train.checkpoints.store import (
    FACTS,
    MANIFEST,
    STATE,
    CheckpointContent,
    best,
    newest_good,
    open_checkpoint,
    places,
    write_checkpoint,
)
from stoker.train.checkpoints.tensors import read_tensors, write_tensors

Values = NDArray[Any]

ARRAYS: dict[str, Values] = {
    "model/dense/kernel": np.arange(24, dtype=np.float32).reshape(4, 6),
    "model/bias": np.array([1.5, -2.25], dtype=ml_dtypes.bfloat16),
    "optimizer/iteration": np.array(7, np.int64),
    "metrics/flag": np.array([True, False, True]),
    "seeds/keras": np.array([1, 2], np.uint32),
    "empty": np.zeros((0, 3), np.float32),
}
IDENTITY: dict[str, dict[str, Any]] = {
    "configuration": {"batch_size": 32},
    "versions": {"keras": "3.15.1"},
}


def write(folder: Path, step: int, *, value: float | None = None) -> Path:
    content = CheckpointContent(
        arrays={
            name: (array + step).astype(array.dtype) if array.dtype.kind == "f" else array
            for name, array in ARRAYS.items()
        },
        facts_text=json.dumps({"epoch": step}),
        step=step,
        identity=IDENTITY,
        best=value,
        elapsed_s=float(step),
    )
    return write_checkpoint(folder, content).path


@given(
    st.dictionaries(
        st.text(max_size=12),
        numpy_st.arrays(
            st.sampled_from([np.float32, np.float16, np.int64, np.uint8, np.bool_, np.float64]),
            numpy_st.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
        ),
        max_size=5,
    )
)
@settings(max_examples=60, deadline=None)
def test_arrays_come_back_bit_by_bit(
    tmp_path_factory: pytest.TempPathFactory, arrays: dict[str, Values]
) -> None:
    path = tmp_path_factory.mktemp("tensors") / "a"

    write_tensors(path, arrays)
    back = read_tensors(path)

    assert back.keys() == arrays.keys()
    for name, array in arrays.items():
        assert (back[name].dtype, back[name].shape) == (array.dtype, array.shape)
        assert back[name].tobytes() == array.tobytes()


def test_a_checkpoint_comes_back_with_its_facts_and_identity(tmp_path: Path) -> None:
    write(tmp_path, 5)

    found = newest_good(tmp_path)

    assert found is not None
    assert (found.step, found.facts, found.identity) == (5, {"epoch": 5}, IDENTITY)
    assert found.arrays()["model/bias"].dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(found.arrays()["model/dense/kernel"][0, :2], [5, 6])


def test_a_dtype_without_a_place_is_refused_by_the_variables_name(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="variable model/words must have a dtype"):
        write_tensors(tmp_path / "a", {"model/words": np.array(["a"])})


@pytest.mark.parametrize("name", [STATE, FACTS, MANIFEST])
def test_each_of_100_flipped_bits_is_found(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, 1) / name
    whole = path.read_bytes()
    rng = np.random.default_rng(0)

    found = 0
    for _ in range(100):
        damaged = bytearray(whole)
        damaged[rng.integers(len(whole))] ^= 1 << int(rng.integers(8))
        path.write_bytes(damaged)
        with pytest.raises(DataError, match="is damaged"):
            open_checkpoint(path.parent)
        found += 1

    path.write_bytes(whole)
    assert open_checkpoint(path.parent).step == 1
    assert found == 100


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b" ")


def another(path: Path) -> None:
    shutil.copy(path.parent.parent / "step-0000000001" / path.name, path)


@pytest.mark.parametrize("name", [STATE, FACTS, MANIFEST])
@pytest.mark.parametrize("damage", [cut, empty, longer, another, Path.unlink])
def test_a_damaged_newest_one_is_named_and_the_one_before_it_taken(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    name: str,
    damage: Callable[[Path], None],
) -> None:
    write(tmp_path, 1)
    newest = write(tmp_path, 2)
    damage(newest / name)

    found = newest_good(tmp_path)

    assert found is not None
    assert found.step == 1
    assert [refused.path for refused in found.refused] == [newest]
    assert name in found.refused[0].why or "step 1" in found.refused[0].why
    assert str(newest) in caplog.text


def test_none_good_of_several_is_an_error_and_never_a_new_beginning(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        empty(write(tmp_path, step) / STATE)

    with pytest.raises(DataError, match="all 3 checkpoints") as error:
        newest_good(tmp_path)
    assert "to train from the beginning" in error.value.fix


def test_without_any_checkpoint_there_is_none(tmp_path: Path) -> None:
    assert newest_good(tmp_path / "missing") is None
    assert newest_good(tmp_path) is None


def test_a_second_one_of_a_step_is_the_newer_one(tmp_path: Path) -> None:
    first, second, other = write(tmp_path, 3), write(tmp_path, 3), write(tmp_path, 10)

    assert places(tmp_path) == [first, second, other]


def test_the_best_one_is_what_the_newest_says_and_its_damage_is_an_error(tmp_path: Path) -> None:
    first = write(tmp_path, 1, value=0.5)
    newest = write(tmp_path, 2)
    assert best(tmp_path).path == newest

    manifest = open_checkpoint(first).manifest
    content = CheckpointContent(
        arrays=ARRAYS,
        facts_text="{}",
        step=3,
        identity=IDENTITY,
        best=manifest.best,
        elapsed_s=3.0,
    )
    third = write_checkpoint(tmp_path, content)
    assert best(tmp_path).path == first
    empty(first / STATE)
    assert newest_good(tmp_path) == third
    with pytest.raises(DataError, match="step-0000000001 is damaged"):
        best(tmp_path)


def test_infinity_in_the_facts_comes_back(tmp_path: Path) -> None:
    facts = json.dumps({"best": math.inf})
    content = CheckpointContent(
        arrays={}, facts_text=facts, step=1, identity={}, best=None, elapsed_s=0.0
    )
    write_checkpoint(tmp_path, content)

    found = newest_good(tmp_path)
    assert found is not None
    assert found.facts == {"best": math.inf}


def test_what_has_changed_is_named_and_refused_unless_it_is_accepted() -> None:
    now: dict[str, dict[str, Any]] = {
        "configuration": {"batch_size": 64},
        "code": {"model.py:build": "b" * 64},
        "versions": {"keras": "3.15.1"},
    }
    before = IDENTITY | {"code": {"model.py:build": "a" * 64}}

    with pytest.raises(UserError, match="--accept-change") as error:
        require_same(before, now, accept_change=False)
    assert "configuration batch_size was 32 and is 64" in str(error.value)
    assert "code model.py:build has changed" in str(error.value)

    accepted = require_same(before, now, accept_change=True)
    assert [change.name for change in accepted] == ["model.py:build", "batch_size"]
    assert require_same(before, before, accept_change=False) == ()
