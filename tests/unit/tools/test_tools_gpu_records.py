"""Records of the GPU suite: any order, any number of calls, one file; no figure of a CPU or a bad card."""

from __future__ import annotations

import importlib
import json
import random
from pathlib import Path
from typing import Any

import pytest
import records
from timeline import Mark, Timeline

Record = dict[str, Any]


def record(part: str, *, date: str = "2026-11-26T10:00:00", **more: Any) -> Record:
    figure = {"name": part, "value": 1.0, "unit": "x", "target": 2.0, "holds": False}
    made = {"part": part, "device": records.GPU, "date": date, "figures": [figure], "refused": []}
    return made | {"card": {"uuid": "GPU-a"}, "commit": "abc"} | more


def rate(of: str, value: float) -> dict[str, Any]:
    return {"name": of, "value": value, "unit": "images/s", "holds": None, "rate_of": of}


def test_parts_merge_in_any_order_to_the_same_file(tmp_path: Path) -> None:
    made = [record(name) for name in ("xla", "train", "serve", "precision")]
    made.append(record("xla", date="2026-11-26T11:00:00"))
    texts = set()
    for seed in range(5):
        random.Random(seed).shuffle(made)
        files = []
        for number, each in enumerate(made):
            files.append(tmp_path / f"{seed}-{number}.json")
            records.put(files[-1], each)
        merged = records.merge(tmp_path / f"{seed}.json", *files)
        texts.add((tmp_path / f"{seed}.json").read_text())

    assert len(texts) == 1
    assert list(merged) == ["train", "serve", "xla", "precision"]
    assert merged["xla"]["date"] == "2026-11-26T11:00:00"


def test_what_a_cpu_measured_is_never_merged(tmp_path: Path) -> None:
    records.put(tmp_path / "cpu.json", record("train", device=records.CPU))

    assert records.merge(tmp_path / "gpu.json", tmp_path / "cpu.json") == {}


@pytest.mark.parametrize("figures", [[], [{"name": "train", "value": None}]])
def test_a_record_without_a_value_replaces_none_that_has_some(
    tmp_path: Path, figures: list[Any]
) -> None:
    records.put(tmp_path / "old.json", record("train"))
    records.put(tmp_path / "new.json", record("train", date="2027-01-01", figures=figures))

    merged = records.merge(tmp_path / "gpu.json", tmp_path / "old.json", tmp_path / "new.json")

    assert merged["train"]["figures"][0]["value"] == 1.0


def test_a_refused_record_holds_nothing_and_says_why() -> None:
    figures = records.figures_of(record("train", refused=["shared with python 7"]))

    assert [(f["holds"], f["refused"]) for f in figures] == [(None, "shared with python 7")]


def test_ours_is_compared_with_the_faster_of_both_peers_on_the_same_card_and_commit() -> None:
    train = record("train", figures=[rate("stoker", 2000.0)])
    fit = record("fit", figures=[rate("fit", 800.0)])
    xla = record("xla_fit", figures=[rate("fit, XLA", 1500.0)])

    first, best = records.derived({"train": train, "fit": fit, "xla_fit": xla})

    assert (first["value"], first["holds"], first["peer"]) == (2.5, True, "fit")
    assert (best["value"], best["holds"], best["peer"]) == (1.333, True, "fit, XLA")
    assert records.derived({"train": train, "fit": fit}) == [first]
    others: tuple[Record, ...] = (
        {"card": {"uuid": "GPU-b"}},
        {"commit": "abd"},
        {"refused": ["slowed by heat"]},
        {"figures": []},
    )
    for more in others:
        assert records.derived({"train": train, "fit": fit, "xla_fit": xla | more}) == [first]


def test_images_of_five_minutes_and_texts_are_compared_too() -> None:
    pairs = {"stoker, five minutes": 500.0, "fit, five minutes": 250.0, "stoker, texts": 11.0}
    parts = {of: record(of, figures=[rate(of, value)]) for of, value in pairs.items()}
    texts = record("transformer_fit", figures=[rate("fit, texts", 10.0)])

    found = records.derived(parts | {"transformer_fit": texts})

    assert [(each["value"], each["holds"]) for each in found] == [(2.0, True), (1.1, False)]


def test_the_share_of_an_epoch_leaves_out_what_happens_once() -> None:
    # Epochs of one call of 10 s; the first two have 30 s of costs that others have not.
    ends = (40.0, 80.0, 91.0, 102.0, 113.0)
    marks = tuple(Mark(at=at, samples=80.0 * n) for n, at in enumerate(ends, start=1))
    found = {"steps": 50, "epochs": 5, "step_time_s": 1.0}

    assert Timeline(began_at=0.0, marks=marks).epoch_share(found) == pytest.approx(1 / 11)


def test_a_file_is_whole_whenever_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    for number in range(20):
        records.put(path, record(f"part{number}"))
        assert len(json.loads(path.read_text())["parts"]) == number + 1


def test_every_part_fits_into_its_time() -> None:
    limits = {name: importlib.import_module(f"parts.{name}").LIMIT_S for name in records.ORDER}

    assert max(limits.values()) <= 100
    assert min(limits.values()) > 0


LINE = Timeline(
    began_at=100.0,
    marks=tuple(Mark(at=110.0 + n, samples=80.0 * (n + 1)) for n in range(21)),
)
"""The first call of 10 steps ends after 10 s, then one each second; 8 samples a step."""


def test_the_first_step_is_told_apart_from_the_others_of_its_call() -> None:
    # 9 of the 10 steps of the first call take 0.9 s.
    assert LINE.until_first_step_s(batch=8) == pytest.approx(9.1)
    assert Timeline(began_at=0.0, marks=()).until_first_step_s(batch=8) is None


def test_rates_are_medians_of_windows() -> None:
    assert LINE.steady() == pytest.approx((80.0, 80.0, 80.0))
    assert LINE.mean_rate() == pytest.approx(80.0)
    own = Timeline(began_at=0.0, marks=LINE.marks, stepping=(70.0, 90.0, 100.0))
    assert own.steady() == (90.0, 70.0, 100.0)


def test_five_minutes_count_from_the_start_of_the_process() -> None:
    assert LINE.five_minutes() == pytest.approx((300 - 9) * 80.0)
    # A start of 100 s and a rate that doubles: only the second half says how it goes on.
    slow = (
        Mark(at=100.0, samples=10.0),
        Mark(at=110.0, samples=20.0),
        Mark(at=115.0, samples=30.0),
    )
    whole = (*slow, Mark(at=120.0, samples=40.0))
    assert Timeline(began_at=0.0, marks=whole).five_minutes() == pytest.approx(40 + 180 * 2)


def test_photographs_are_the_same_however_many_cores_make_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import data

    made = []
    for cores in (1, 4):
        monkeypatch.setattr("os.sched_getaffinity", lambda _, n=cores: set(range(n)))
        folder = tmp_path / str(cores)
        photos = data.photographs(folder, count=170, height=24, width=32)
        paths = data.records(photos, files=8)
        made.append([path.read_bytes() for path in [*sorted(photos.rglob("*.jpg")), *paths]])

    assert len(made[0]) == 178
    assert made[0] == made[1]


def test_records_are_what_tensorflow_reads(tmp_path: Path) -> None:
    import data
    import tensorflow as tf

    photos = data.photographs(tmp_path / "p", count=8, height=24, width=32)
    paths = [str(path) for path in data.records(photos, files=2)]

    found = {}
    for record in tf.data.TFRecordDataset(paths):
        example = tf.train.Example.FromString(record.numpy())
        feature = example.features.feature
        image = feature["image"].bytes_list.value[0]
        found[image] = feature["label"].int64_list.value[0]
    files = sorted(photos.rglob("*.jpg"))
    assert found == {path.read_bytes(): int(path.parent.name[-1]) for path in files}
