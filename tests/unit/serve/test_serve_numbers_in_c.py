"""The reader of lists of numbers in C: to the bit what Python reads, within the text, or not at all."""

from __future__ import annotations

import functools
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.core.compiled import NotBuilt, load_compiled
from stoker.serve.rest import numbers

BIG = json.dumps({"instances": [[float(i), 0.5] for i in range(4000)]}).encode()


def read(raw: bytes, begin: int) -> Any:
    assert numbers._library() is not None, "it needs a C compiler (cc)"
    return numbers.read_by_c(raw, begin)


def test_c_reads_the_double_that_is_nearest() -> None:
    rng = np.random.default_rng(0)
    shares = rng.uniform(size=4000)
    digits = [int(n) for n in rng.integers(1, 10**15, 4000)]
    between = [2**53 + 2 * int(n) + 1 for n in rng.integers(0, 2**40, 40)]
    texts = [
        *map(repr, shares.tolist()),
        *map(repr, shares.astype(np.float32).tolist()),
        *(f"{-share:.{places}f}" for share in shares[:400] for places in range(1, 19)),
        *(f"{n}e{power}" for n, power in zip(digits, itertools.cycle(range(-27, 28)))),
        *(f"{n}.{digits[0]}" for n in digits[:4]),
        # Just between two doubles: strtod's.
        *(f"{n}.0" for n in between),
        *("0", "-0", "0.0", "-0.0", "0e5", "-0e-5", "9007199254740992.0", "1E+2", "1.5e-0003"),
    ]
    raw = f"[{', '.join(texts)}]".encode()

    found = read(raw, 0)

    assert found is not None
    assert found[1] == len(raw)
    # A whole number has no sign where it is zero.
    wanted = np.array([float(json.loads(text)) for text in texts])
    assert found[0].tobytes() == wanted.tobytes()


@given(st.data())
def test_what_c_reads_of_a_damaged_text_is_what_python_reads(data: Any) -> None:
    rows = data.draw(st.lists(st.lists(st.floats(-2, 2), min_size=2, max_size=2), min_size=1))
    raw = bytearray(json.dumps(rows).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(raw) - 1))
        put = data.draw(st.sampled_from(b"0123456789+-.eE[], \n\x00\xffn"))
        match data.draw(st.sampled_from(["change", "insert", "cut"])):
            case "change":
                raw[at] = put
            case "insert":
                raw.insert(at, put)
            case _:
                del raw[at:]
                raw += b"]"

    found = read(bytes(raw), 0)

    if found is not None:
        wide, end = found
        wanted = np.array(json.loads(raw[:end]), wide.dtype)
        assert (wide.shape, wide.tobytes()) == (wanted.shape, wanted.tobytes())


def test_a_text_that_ends_anywhere_is_not_read_beyond() -> None:
    raw = b"[[0.123456789, -1.5e-7], [12345678901234567, 9]]"
    for size in range(len(raw)):
        assert read(raw[:size], 0) is None
        # As another list's beginning would stand in memory behind it.
        assert read(raw[:size] + b"\x00" + raw[size:], 0) is None


def test_where_nothing_is_compiled_simdjson_reads_and_it_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> Any:
        raise NotBuilt("no C compiler (cc) is on the PATH")

    monkeypatch.setattr(f"{numbers.__name__}.load_compiled", fails)
    monkeypatch.setattr(numbers, "_library", functools.cache(numbers._library.__wrapped__))
    caplog.set_level("INFO")

    assert [numbers.read_numbers(BIG) is not None for _ in range(3)] == [True] * 3
    assert caplog.text.count("read by simdjson: no C compiler (cc)") == 1


def test_a_compiled_reader_that_reads_otherwise_is_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = Path(numbers.__file__).with_name("numbers.c")
    wrong = tmp_path / "numbers.c"
    wrong.write_text(source.read_text().replace("1e3, ", "1e4, ", 1))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(
        f"{numbers.__name__}.load_compiled", lambda _, *more: load_compiled(wrong, *more)
    )

    assert numbers._library.__wrapped__() is None
    assert "reads otherwise" in caplog.text
