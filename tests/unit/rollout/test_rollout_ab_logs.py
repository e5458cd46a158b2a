"""The keys and outcomes of an A/B test, as servers write them, and its result."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stoker.core.errors import ConfigError, UserError
from stoker.rollout.ab.append_log import LogReader, LogWriter, objects_of
from stoker.rollout.ab.assignments import AssignmentLog, key_text, logs_of
from stoker.rollout.ab.logs import ABTestLogs
from stoker.rollout.ab.outcomes import Outcome, OutcomeLog, UnknownKey, add_from_command
from stoker.rollout.ab.result import ArmResult, result_of
from stoker.rollout.state.ab_settings import ABTestSettings, Metric
from stoker.rollout.state.changes import begin_test
from stoker.rollout.state.settings import RolloutSettings
from stoker.rollout.statistics.confidence_sequence import ArmTotals, difference
from stoker.serve.errors import Code, ServeError
from stoker.serve.routing import Route

TEST = ABTestSettings(arms=((1, 0.5), (2, 0.5)), baseline=1, salt="00" * 16)
HASH = TEST.key_hash()


def assigned(folder: Path, server: str = "one", max_keys: int = 1_000) -> AssignmentLog:
    log = AssignmentLog(folder, server=server, max_keys=max_keys)
    log.refresh()
    return log


def lines_of(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [row for block in LogReader(folder, f"{kind}-*").blocks() for row in objects_of(block)]


def logged(folder: Path) -> list[tuple[str, int]]:
    return [(line["key"], line["arm"]) for line in lines_of(folder, "assignments")]


def write(folder: Path, kind: str, *lines: Mapping[str, object]) -> None:
    LogWriter(folder, kind).append([json.dumps(line).encode() for line in lines])


def arms(folder: Path, test: ABTestSettings = TEST) -> list[ArmResult]:
    return result_of(folder, test, shares=test.shares).arms


def test_a_key_is_written_once_by_all_servers_and_again_by_none(tmp_path: Path) -> None:
    one, two = assigned(tmp_path), assigned(tmp_path, "two")
    for _ in range(3):
        one.record(7, 1)
    two.refresh()
    two.record(7, 1)
    two.record(8, 2)
    assigned(tmp_path, "restarted").record(8, 2)

    assert logged(tmp_path) == [(key_text(7), 1), (key_text(8), 2)]


def test_a_log_takes_no_more_keys_than_it_may(tmp_path: Path) -> None:
    one = assigned(tmp_path, max_keys=3)
    for key in range(10):
        one.record(key, 1)
    two = assigned(tmp_path, "two", max_keys=3)
    two.record(11, 1)

    assert len(logged(tmp_path)) == 3
    found = result_of(tmp_path, replace(TEST, max_keys=3), shares=TEST.shares)
    assert "The log is full: keys after the first 3 do not count." in found.warnings


def test_a_folder_that_cannot_be_written_fails_no_request(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    log = assigned(tmp_path / "file" / "logs")

    log.record(7, 1)
    (tmp_path / "file").unlink()
    log.record(7, 1)

    assert logged(tmp_path / "file" / "logs") == [(key_text(7), 1)]


def test_outcomes_are_written_all_or_none(tmp_path: Path) -> None:
    keys, log = assigned(tmp_path), OutcomeLog(tmp_path, replace(TEST, max_value=1.0), name="one")
    keys.record(HASH(b"ann"), 1)
    ann = Outcome(key="ann", value=1.0)

    others = [Outcome(key=key, value=1.0) for key in ("bob", "cy", "dan", "eve")]
    with pytest.raises(UnknownKey, match="Received: 'bob', 'cy', 'dan' and 1 more"):
        log.add([ann, *others], unknown=keys.unknown)
    with pytest.raises(ConfigError, match="from 0 to 1"):
        log.add([ann, Outcome(key="ann", value=2.0)], unknown=keys.unknown)
    assert list(tmp_path.glob("outcomes-*")) == []

    # Another server has answered bob: this one reads its log before it refuses him.
    assigned(tmp_path, "two").record(HASH(b"bob"), 2)
    log.add([ann, Outcome(key="bob", value=0.0)], unknown=keys.unknown)
    # A key that is not UTF-8: the header has these bytes, and the command line gets them as a surrogate.
    keys.record(HASH(b"\xff"), 2)
    add_from_command(tmp_path, TEST, [Outcome(key="\udcff", value=0.0)])
    add_from_command(tmp_path, TEST, [Outcome(key="bob", value=1.0)])
    with pytest.raises(UnknownKey, match="'cy'"):
        add_from_command(tmp_path, TEST, [Outcome(key="cy", value=1.0)])

    found = [(each["key"], each["value"]) for each in lines_of(tmp_path, "outcomes")]
    ann_key, bob_key = key_text(HASH(b"ann")), key_text(HASH(b"bob"))
    byte_key = key_text(HASH(b"\xff"))
    assert sorted(found) == sorted(
        [(ann_key, 1.0), (bob_key, 0.0), (bob_key, 1.0), (byte_key, 0.0)]
    )


def test_outcomes_have_a_largest_size(tmp_path: Path) -> None:
    keys, log = assigned(tmp_path), OutcomeLog(tmp_path, replace(TEST, max_keys=1), name="one")
    keys.record(HASH(b"ann"), 1)
    for _ in range(9):
        log.add([Outcome(key="ann", value=1.0)], unknown=keys.unknown)
    with pytest.raises(UserError, match="must stay below 512 bytes"):
        log.add([Outcome(key="ann", value=1.0)], unknown=keys.unknown)


def test_a_key_is_one_value_of_the_arm_that_it_was_first_assigned_to(tmp_path: Path) -> None:
    a, b, c = (key_text(key) for key in (10, 11, 12))
    write(
        tmp_path,
        "assignments-late",
        {"at": 9.0, "key": a, "arm": 2},
        {"at": 2.0, "key": b, "arm": 2},
    )
    write(
        tmp_path,
        "assignments-zero",
        {"at": 1.0, "key": a, "arm": 1},
        {"at": 3.0, "key": b, "arm": 1},
        {"at": 3.0, "key": c, "arm": 1},
        {"at": 3.0, "arm": 1},
    )
    write(tmp_path, "outcomes-one", *({"at": at, "key": a, "value": at} for at in (5.0, 4.0)))
    write(tmp_path, "outcomes-two", {"at": 3.0, "key": a, "value": 30.0})
    write(tmp_path, "outcomes-x", {"at": 3.0, "key": key_text(99), "value": 1.0})

    first = arms(tmp_path)
    assert [(each.totals.keys, each.reported) for each in first] == [(2, 1), (1, 0)]
    assert first[0].totals == ArmTotals(keys=2, total=30.0, squares=900.0, nonzero=1)
    whole = arms(tmp_path, replace(TEST, metric=Metric.SUM))
    assert whole[0].totals == ArmTotals(keys=2, total=39.0, squares=39.0**2, nonzero=1)
    warnings = result_of(tmp_path, TEST, shares=TEST.shares).warnings
    assert warnings == [
        "1 outcomes are of keys whose assignment is not in the logs.",
        "1 lines of the logs are cut or damaged, and left out.",
    ]


def test_the_interval_of_logs_is_that_of_their_sums(tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    keys = random.integers(0, 2**63, 2_000, dtype=np.uint64)
    arm = random.integers(1, 3, len(keys))
    value = (random.random(len(keys)) < 0.1 * arm).astype(float)
    rows = list(zip(keys.tolist(), arm.tolist(), value.tolist(), strict=True))
    write(
        tmp_path,
        "assignments-one",
        *({"at": 1.0, "key": key_text(key), "arm": number} for key, number, _ in rows),
    )
    few = [{"at": 2.0, "key": key_text(key), "value": each} for key, _, each in rows if each][:60]
    write(tmp_path, "outcomes-one", *few)
    bounded = replace(TEST, max_value=1.0)
    assert [each.difference for each in arms(tmp_path, bounded)] == [None, None]
    rest = [{"at": 2.0, "key": key_text(key), "value": each} for key, _, each in rows if each][60:]
    write(tmp_path, "outcomes-one", *rest)

    expected = [
        ArmTotals(
            keys=int((arm == number).sum()),
            total=float(value[arm == number].sum()),
            squares=float((value[arm == number] ** 2).sum()),
            nonzero=int(value[arm == number].sum()),
        )
        for number in (1, 2)
    ]
    found = arms(tmp_path, bounded)
    assert [each.totals for each in found] == expected
    assert found[0].difference is None
    assert found[1].difference == difference(*expected)
    several = replace(bounded, arms=((1, 0.5), (2, 0.3), (3, 0.2)))
    wide = arms(tmp_path, several)
    assert wide[1].difference == difference(*expected, comparisons=2)
    assert wide[2].difference is None
    tight = arms(tmp_path, replace(bounded, alpha=0.2))[1].difference
    assert tight == difference(*expected, alpha=0.2)
    assert tight is not None
    assert found[1].difference is not None
    assert tight.low > found[1].difference.low > 0.0


def test_outcomes_without_a_bound_need_100_that_are_not_zero(tmp_path: Path) -> None:
    rows = [(key, 1 + key % 2) for key in range(400)]
    lines = [{"at": 1.0, "key": key_text(key), "arm": arm} for key, arm in rows]
    write(tmp_path, "assignments-one", *lines)
    some = [{"at": 2.0, "key": key_text(key), "value": 1.0} for key, _ in rows]
    write(tmp_path, "outcomes-one", *some[:120])
    assert arms(tmp_path)[1].difference is None
    assert arms(tmp_path, replace(TEST, max_value=1.0))[1].difference is not None
    write(tmp_path, "outcomes-one", *some[120:200])
    assert arms(tmp_path)[1].difference is not None


@pytest.mark.parametrize(
    "damaged",
    [
        b"{",
        b"[1]",
        b"\xff\xfe",
        b'"text"',
        b"{}",
        b'{"at":1.0,"key":"zz","arm":1}',
        b'{"at":1.0,"key":7,"arm":1}',
        b'{"at":1.0,"key":"00000000000000aa","arm":"x"}',
        b'{"at":1.0,"key":"00000000000000aa","arm":1e400}',
    ],
)
def test_a_damaged_line_is_left_out_and_reported(tmp_path: Path, damaged: bytes) -> None:
    log = LogWriter(tmp_path, "assignments-one")
    good = [f'{{"at":1.0,"key":"{key_text(key)}","arm":1}}'.encode() for key in range(4)]
    log.append([*good[:2], damaged, *good[2:]])

    found = result_of(tmp_path, TEST, shares={1: 0.999, 2: 0.001})

    assert found.arms[0].totals.keys == 4
    assert found.warnings == ["1 lines of the logs are cut or damaged, and left out."]
    assert assigned(tmp_path, "two").unknown({0, 1, 2, 3}) == set()


@pytest.mark.parametrize(("second", "warns"), [(1_000, False), (800, True)])
def test_arms_without_the_keys_of_their_weights_are_a_warning(
    tmp_path: Path, second: int, warns: bool
) -> None:
    rows = [(key, 1) for key in range(1_000)] + [(key, 2) for key in range(2_000, 2_000 + second)]
    lines = [{"at": 1.0, "key": key_text(key), "arm": arm} for key, arm in rows]
    write(tmp_path, "assignments-one", *lines)

    warnings = result_of(tmp_path, TEST, shares=TEST.shares).warnings

    assert any("version 2 44.44% instead of 50.00%" in each for each in warnings) is warns
    assert len(warnings) == warns


def test_the_result_of_a_test_without_keys_is_too_early(tmp_path: Path) -> None:
    found = result_of(tmp_path / "none", TEST, shares=TEST.shares)

    assert [each.totals.keys for each in found.arms] == [0, 0]
    assert math.isnan(found.arms[0].totals.mean)
    assert [each.difference for each in found.arms] == [None, None]
    assert found.warnings == []


def test_a_repository_that_takes_no_outcomes_is_reported_as_unavailable(tmp_path: Path) -> None:
    state = begin_test(None, TEST, settings=RolloutSettings(key="x-user"), now_s=0.0)
    logs = ABTestLogs(tmp_path, server="one")
    logs.take_up(state)
    assert logs.record(Route(version=1, otherwise=1, key=HASH(b"ann"), test=1))
    (tmp_path / "ab").rename(tmp_path / "elsewhere")
    (tmp_path / "ab").write_text("")

    with pytest.raises(ServeError, match="must be written to the model repository") as error:
        logs.add_outcomes("m", [("ann", 1.0)])
    assert error.value.code is Code.UNAVAILABLE

    (tmp_path / "ab").unlink()
    logs.add_outcomes("m", [("ann", 1.0)])
    assert len(lines_of(logs_of(tmp_path, 1), "outcomes")) == 1
