"""Damaged TFRecord files: each fault named with file, record and byte, and the neighbors kept."""

from __future__ import annotations

import gzip
import random
import resource
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from stoker.core.errors import DataError
from stoker.data.ingest import IngestConfig, ingest
from stoker.data.sources.formats.framing import masked_crc
from stoker.data.sources.formats.tfrecord_files import Example

RECORDS = 60
HEADER, FOOTER = 12, 4


def framed(payload: bytes) -> bytes:
    length = struct.pack("<Q", len(payload))
    checks = (struct.pack("<I", masked_crc(part)) for part in (length, payload))
    return length + next(checks) + payload + next(checks)


def example(index: int) -> bytes:
    made = Example()
    made.features.feature["id"].int64_list.value.append(index)
    made.features.feature["vector"].float_list.value.extend([index / 2, index / 4])
    made.features.feature["word"].bytes_list.value.append(f"word {index}".encode())
    return bytes(made.SerializeToString())


PAYLOADS = [example(index) for index in range(RECORDS)]
FRAMES = [framed(payload) for payload in PAYLOADS]
WHOLE = b"".join(FRAMES)
STARTS = [sum(map(len, FRAMES[:index])) for index in range(RECORDS)]


def crafted(length: int) -> bytes:
    """A header with a right checksum, and nothing after it."""
    packed = struct.pack("<Q", length)
    return packed + struct.pack("<I", masked_crc(packed))


def flipped(data: bytes, at: int, bit: int = 0) -> bytes:
    return data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]


def replaced(index: int, frame: bytes) -> bytes:
    return b"".join([*FRAMES[:index], frame, *FRAMES[index + 1 :]])


def write(folder: Path, data: bytes, name: str = "data.tfrecord") -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


def ids(folder: Path, source: Path, **settings: Any) -> tuple[list[int], list[tuple[int, str]]]:
    """The records that ingest keeps, and those that it leaves out with the reasons."""
    dataset = ingest(IngestConfig(source=str(source), **settings), folder / "out")
    tables = [
        pq.read_table(folder / "out" / shard.file)
        for shards in dataset.splits.values()
        for shard in shards
    ]
    kept = sorted(value for table in tables for value in table["id"].to_pylist())
    return kept, [(bad.row, bad.reason) for bad in dataset.bad_rows]


def but(*left_out: int) -> list[int]:
    return [index for index in range(RECORDS) if index not in left_out]


LAST = STARTS[-1]
MIDDLE = STARTS[7]

FAULTS: dict[str, tuple[bytes, list[int], int, str]] = {
    # fault: (the file, the records that are kept, the bad record, the message)
    "cut in the last header": (WHOLE[: LAST + 5], but(59), 60, "ends inside a header, 5 of 12"),
    "cut in the last payload": (WHOLE[:-10], but(59), 60, "the record is truncated"),
    "cut in the last checksum": (WHOLE[:-1], but(59), 60, "the record is truncated"),
    "bytes after the last record": (WHOLE + b"\0\0\0", but(), 61, "ends inside a header, 3 of 12"),
    "bit flipped in a length": (
        flipped(WHOLE, MIDDLE),
        but(7),
        8,
        f"at byte {MIDDLE:,}: the checksum of the length is wrong; {len(FRAMES[7])} bytes",
    ),
    "bit flipped in a length's checksum": (
        flipped(WHOLE, MIDDLE + 9),
        but(7),
        8,
        "the checksum of the length is wrong",
    ),
    "bit flipped in a payload": (
        flipped(WHOLE, MIDDLE + HEADER + 3),
        but(7),
        8,
        f"at byte {MIDDLE:,}: the checksum of the payload is wrong",
    ),
    "bit flipped in a payload's checksum": (
        flipped(WHOLE, STARTS[8] - 1),
        but(7),
        8,
        "the checksum of the payload is wrong",
    ),
    "length of 64 GiB with a right checksum": (
        replaced(7, crafted(64 << 30) + FRAMES[7][HEADER:]),
        but(7),
        8,
        "its length is wrong: 68,719,476,752 bytes",
    ),
    "length beyond 2^63 with a right checksum": (
        replaced(7, crafted(2**64 - 1)),
        but(7),
        8,
        "its length is wrong",
    ),
    "junk with right checksums": (
        replaced(6, framed(b"\xff junk")),
        but(6),
        7,
        "it cannot be parsed as a tf.train.Example",
    ),
    "record without a byte": (
        replaced(6, framed(b"")),
        but(6),
        7,
        "a tf.train.Example without features",
    ),
    "SequenceExample": (
        replaced(6, framed(PAYLOADS[6] + b"\x12\x00")),
        but(6),
        7,
        "it is not a tf.train.Example: it has other fields",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_an_error_that_names_file_record_and_what_is_wrong(
    tmp_path: Path, fault: str
) -> None:
    data, _, row, said = FAULTS[fault]

    with pytest.raises(DataError) as caught:
        ids(tmp_path, write(tmp_path, data))

    assert f"data.tfrecord row {row}: " in str(caught.value)
    assert said in str(caught.value)
    assert "1 bad record." in str(caught.value)
    assert not list((tmp_path / "out").glob("**/*.parquet"))


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_is_allowed_is_counted_and_its_neighbors_are_kept(
    tmp_path: Path, fault: str, packed: bool
) -> None:
    data, kept, row, said = FAULTS[fault]
    source = write(tmp_path, gzip.compress(data) if packed else data)

    found, bad = ids(tmp_path, source, max_bad_rows=1)

    assert found == kept
    ((bad_row, reason),) = bad
    assert bad_row == row
    if not packed or "length is wrong" not in said:
        assert said in reason


def test_every_one_of_100_flipped_bits_is_found_and_costs_one_record(tmp_path: Path) -> None:
    random_ = random.Random(3)
    for seed in range(100):
        at = random_.randrange(len(WHOLE))
        source = write(tmp_path, flipped(WHOLE, at, random_.randrange(8)), f"{seed}.tfrecord")
        hit = max(index for index in range(RECORDS) if STARTS[index] <= at)

        folder = tmp_path / str(seed)
        folder.mkdir()
        found, bad = ids(folder, source, max_bad_rows=1)

        assert found == but(hit)
        assert [row for row, _ in bad] == [hit + 1]


def test_every_cut_inside_a_record_is_found_and_the_records_before_it_are_kept(
    tmp_path: Path,
) -> None:
    for size in range(STARTS[50] + 1, STARTS[51]):
        source = write(tmp_path, WHOLE[:size])
        with pytest.raises(DataError, match=r"data\.tfrecord row 51: at byte "):
            ids(tmp_path, source)

    found, bad = ids(tmp_path, source, max_bad_rows=1)

    assert found == list(range(50))
    assert len(bad) == 1


def test_several_faults_in_one_file_are_all_named(tmp_path: Path) -> None:
    data = bytearray(WHOLE)
    data[STARTS[3]] ^= 1
    data[STARTS[20] + HEADER] ^= 1
    data[STARTS[21] + 8] ^= 1

    found, bad = ids(tmp_path, write(tmp_path, bytes(data)[:-2]), max_bad_rows=4)

    assert found == but(3, 20, 21, 59)
    assert [row for row, _ in bad] == [4, 21, 22, 60]


def test_an_empty_file_is_an_error_even_where_bad_records_are_allowed(tmp_path: Path) -> None:
    write(tmp_path, WHOLE, "a.tfrecord")
    write(tmp_path, b"", "b.tfrecord")

    with pytest.raises(DataError, match=r"b\.tfrecord must hold TFRecord data.*an empty file"):
        ids(tmp_path, tmp_path, max_bad_rows=1000)


@pytest.mark.parametrize(
    ("name", "pack"),
    [
        ("data.tfrecord", gzip.compress),
        ("data.tfrecord.gz", bytes),
        ("data.tfrecord.gz", gzip.compress),
        ("data.tfrecord", zlib.compress),
        ("data.tfrecord.gz", lambda data: gzip.compress(data[:100]) + gzip.compress(data[100:])),
    ],
    ids=["gzip, plain name", "plain, gzip name", "gzip", "zlib", "gzip of two members"],
)
def test_the_first_bytes_say_how_a_file_is_packed_and_not_its_name(
    tmp_path: Path, name: str, pack: Callable[[bytes], bytes]
) -> None:
    found, bad = ids(tmp_path, write(tmp_path, pack(WHOLE), name))

    assert found == but()
    assert bad == []


@pytest.mark.parametrize("cut", [0.3, 0.5, 1.0], ids=["early", "middle", "trailer"])
def test_a_gzip_file_that_is_cut_is_an_error_however_many_bad_rows_are_permitted(
    tmp_path: Path, cut: float
) -> None:
    packed = gzip.compress(WHOLE)
    source = write(tmp_path, packed[: int(len(packed) * cut) - 2])

    with pytest.raises(
        DataError, match=r"must be complete, undamaged gzip.* a file that is truncated"
    ):
        ids(tmp_path, source, max_bad_rows=1000)


def test_damage_inside_gzip_is_an_error_or_changes_nothing(tmp_path: Path) -> None:
    packed = gzip.compress(WHOLE)
    random_ = random.Random(5)
    harmless = 0
    for seed in range(100):
        at = random_.randrange(len(packed))
        source = write(tmp_path, flipped(packed, at, random_.randrange(8)))
        try:
            found, _ = ids(tmp_path / str(seed), source)
        except DataError:
            continue
        harmless += 1
        assert found == but()
        assert at < 10  # the header's time and flags, which say nothing of the data
    assert harmless < 10


@pytest.mark.parametrize(
    "content",
    [b"a,b\n1,2\n" * 50, b"PAR1 and more", gzip.compress(b"a,b\n1,2\n"), bytes(10_000)],
    ids=["CSV", "Parquet", "gzip of CSV", "zeros"],
)
def test_a_file_that_is_not_a_tfrecord_is_an_error_even_where_bad_records_are_allowed(
    tmp_path: Path, content: bytes
) -> None:
    with pytest.raises(DataError, match=r"data\.tfrecord must hold TFRecord data"):
        ids(tmp_path, write(tmp_path, content), max_bad_rows=1000)


def test_a_length_of_64_gib_neither_crashes_nor_fills_the_memory(tmp_path: Path) -> None:
    source = write(tmp_path, replaced(7, crafted(64 << 30)))
    script = (
        "import sys\n"
        "from stoker.data.sources.formats.framing import read_frames\n"
        "from pathlib import Path\n"
        "path = Path(sys.argv[1])\n"
        "frames = list(read_frames(path, location='x'))\n"
        "print(sum(len(each.payloads) for each in frames))\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", script, str(source)],
        capture_output=True,
        text=True,
        timeout=300,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30)),
    )

    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == RECORDS - 1


def test_a_feature_that_one_file_lacks_is_named_with_the_file(tmp_path: Path) -> None:
    write(tmp_path, WHOLE, "a.tfrecord")
    other = Example()
    other.features.feature["id"].int64_list.value.append(1)
    other.features.feature["term"].bytes_list.value.append(b"x")
    write(tmp_path, framed(other.SerializeToString()), "b.tfrecord")

    with pytest.raises(DataError, match=r"b\.tfrecord .*no 'vector', 'word' and additional 'term'"):
        ids(tmp_path, tmp_path, max_bad_rows=1000)


def deviating(index: int, **features: Any) -> bytes:
    made = Example.FromString(PAYLOADS[index])
    for name, (kind, values) in features.items():
        del made.features.feature[name]
        getattr(made.features.feature[name], kind).value.extend(values)
    return framed(made.SerializeToString())


@pytest.mark.parametrize(
    ("feature", "kind", "given", "said"),
    [
        (
            "vector",
            "float_list",
            [1.0, 2.0, 3.0],
            "a vector of length 3 instead of 2",
        ),
        ("id", "int64_list", [1, 2], "it holds 2 values instead of one"),
        ("id", "float_list", [1.0], "it holds a float_list instead of an int64_list"),
        ("word", "bytes_list", [b"\xff\x00"], "bytes that are not text instead of text"),
        ("id", "int64_list", [], "the label is missing"),
    ],
)
def test_a_record_that_deviates_is_named_with_its_feature_and_the_others_are_kept(
    tmp_path: Path, feature: str, kind: str, given: list[Any], said: str
) -> None:
    data = b"".join([*FRAMES, *FRAMES, deviating(5, **{feature: (kind, given)})])
    source = write(tmp_path, data)
    config = IngestConfig(source=str(source), max_bad_rows=1)

    dataset = ingest(config, tmp_path / "out", label="id")

    assert sum(dataset.rows(split) for split in dataset.splits) == 2 * RECORDS
    (bad,) = dataset.bad_rows
    assert (bad.file, bad.row, bad.column) == ("data.tfrecord", 2 * RECORDS + 1, feature)
    assert said in bad.reason


def test_a_feature_of_many_kinds_is_one_error_with_the_kinds_and_their_counts(
    tmp_path: Path,
) -> None:
    kinds = [("float_list", [0.0, 0.0]), ("int64_list", [0, 0, 0])]
    odd = [deviating(i, vector=kinds[i % 2]) for i in range(RECORDS)]

    with pytest.raises(DataError) as caught:
        ids(tmp_path, write(tmp_path, b"".join(odd)), max_bad_rows=3)

    assert "column 'vector' must hold the same kind of value in every record" in str(caught.value)
    assert "2 values, each a float_list, in 30 records (first data.tfrecord record 1)" in str(
        caught.value
    )
    assert "3 values, each an int64_list, in 30 records (first data.tfrecord record 2)" in str(
        caught.value
    )


def test_a_feature_of_bytes_that_are_neither_text_nor_image_is_one_error(tmp_path: Path) -> None:
    raw = [deviating(i, word=("bytes_list", [b"\xfe\x00\x01"])) for i in range(RECORDS)]

    with pytest.raises(
        DataError, match=r"'word' must hold .*bytes that are not text, in 60 records"
    ):
        ids(tmp_path, write(tmp_path, b"".join(raw)))


def test_two_equal_files_are_reported_as_copies(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    write(source, WHOLE, "a.tfrecord")
    write(source, WHOLE, "b.tfrecord")

    ids(tmp_path, source)

    assert "b.tfrecord is a copy of a.tfrecord" in caplog.text


KILLED_INGEST = """
import sys
import time
from pathlib import Path
from stoker.data.ingest import IngestConfig, ingest
ingest(IngestConfig(source=sys.argv[1], shard_rows=2000), Path(sys.argv[2]))
"""


def test_an_ingest_of_tfrecord_that_is_killed_goes_on_where_it_was(tmp_path: Path) -> None:
    source = write(tmp_path, b"".join(framed(example(index)) for index in range(60_000)))
    config = IngestConfig(source=str(source), shard_rows=2000)
    out = tmp_path / "killed"
    process = subprocess.Popen([sys.executable, "-c", KILLED_INGEST, str(source), str(out)])
    deadline_s = time.monotonic() + 300
    while process.poll() is None and len(list(out.glob("train/*.parquet"))) < 8:
        assert time.monotonic() < deadline_s
        time.sleep(0.001)
    process.kill()
    process.wait()
    assert not (out / "manifest.json").exists()

    resumed = ingest(config, out)

    assert resumed.fingerprint == ingest(config, tmp_path / "undisturbed").fingerprint
