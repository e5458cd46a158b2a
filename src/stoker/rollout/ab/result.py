"""The result of an A/B test, computed from its logs: each arm's keys, mean and difference from the baseline."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj
from numpy.typing import NDArray

from stoker.rollout.ab.append_log import LogReader, objects_of
from stoker.rollout.state.ab_settings import ABTestSettings, Metric
from stoker.rollout.state.state import RolloutState
from stoker.rollout.statistics.confidence_sequence import (
    ArmTotals,
    Difference,
    difference,
    log_share_evidence,
)

SHARES_ALPHA = 0.01
"""Maximum probability, over a whole test, of a false warning about the arms' shares of the keys."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ArmResult:
    """One arm of a test."""

    version: int
    """The version of the model."""

    share: float
    """Share of the keys that the weights give to the arm."""

    totals: ArmTotals
    """Sums over the outcomes of the arm's keys."""

    reported: int
    """Number of keys with an outcome; an outcome of 0 counts."""

    is_baseline: bool
    """Whether this arm is the baseline."""

    difference: Difference | None
    """Difference from the baseline; None if the arm is the baseline, or too few outcomes were reported."""

    @property
    def verdict(self) -> str:
        """Return what the interval shows: the mean is higher or lower than the baseline's, or neither."""
        if self.is_baseline:
            return "baseline"
        if self.difference is None:
            return "too early"
        if self.difference.low > 0:
            return "higher"
        return "lower" if self.difference.high < 0 else "no difference shown"

    def to_json(self) -> dict[str, Any]:
        """Return the fields as a JSON object."""
        found = self.difference
        return {
            "version": self.version,
            "weight": self.share,
            "keys": self.totals.keys,
            "keys_with_outcome": self.reported,
            "mean": self.totals.mean if self.totals.keys else None,
            "verdict": self.verdict,
            "difference": None if found is None else found.estimate,
            "low": None if found is None else found.low,
            "high": None if found is None else found.high,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class ABResult:
    """The current result of a test."""

    arms: list[ArmResult]
    """The arms, in the order of the test's settings."""

    warnings: list[str]
    """Reasons why the result may be wrong, one sentence each."""

    def to_json(self, state: RolloutState, test: ABTestSettings) -> dict[str, Any]:
        """Return the fields as a JSON object.

        Args:
            state: The newest state of the test.
            test: Settings of the test.
        """
        return {
            "rollout": state.rollout,
            "phase": state.phase,
            "metric": test.metric,
            "alpha": test.alpha,
            "baseline": test.baseline,
            "arms": [arm.to_json() for arm in self.arms],
            "warnings": self.warnings,
        }


def result_of(folder: Path, test: ABTestSettings, *, shares: Mapping[int, float]) -> ABResult:
    """Read the logs of a test, and compare each arm with the baseline.

    Args:
        folder: Folder of the test's logs.
        test: Settings of the test.
        shares: Version -> share of the keys that the traffic split gives to this arm.
    """
    assigned = _lines(folder, "assignments", "arm", pa.int64()).first()
    outcomes = _lines(folder, "outcomes", "value", pa.float64())
    if test.metric is Metric.FIRST:
        outcomes = outcomes.first()
    keys, arms = assigned.keys, assigned.fields
    values, has_outcome, without_key = _values(keys, outcomes)
    totals, reported = {}, {}
    for version in test.shares:
        mine = values[arms == version]
        totals[version] = ArmTotals(
            keys=len(mine),
            total=float(mine.sum()),
            squares=float((mine**2).sum()),
            nonzero=int(np.count_nonzero(mine)),
        )
        reported[version] = int(has_outcome[arms == version].sum())
    found = [
        ArmResult(
            version=version,
            share=share,
            totals=totals[version],
            reported=reported[version],
            is_baseline=version == test.baseline,
            difference=None
            if version == test.baseline
            else difference(
                totals[test.baseline],
                totals[version],
                comparisons=len(test.arms) - 1,
                bounded=test.bounded,
                alpha=test.alpha,
            ),
        )
        for version, share in test.arms
    ]
    warnings = _share_warning(found, shares)
    if len(keys) >= test.max_keys:
        warnings.append(f"The log is full: keys after the first {test.max_keys:,} do not count.")
    if without_key:
        warnings.append(
            f"{without_key:,} outcomes are of keys whose assignment is not in the logs."
        )
    if left_out := assigned.left_out + outcomes.left_out:
        warnings.append(f"{left_out:,} lines of the logs are cut or damaged, and left out.")
    return ABResult(arms=found, warnings=warnings)


def _share_warning(arms: list[ArmResult], shares: Mapping[int, float]) -> list[str]:
    keys = [arm.totals.keys for arm in arms]
    evidence = log_share_evidence(keys, [shares[arm.version] for arm in arms])
    if evidence < math.log(1.0 / SHARES_ALPHA):
        return []
    seen = ", ".join(
        f"version {arm.version} {count / sum(keys):.2%} instead of {arm.share:.2%}"
        for arm, count in zip(arms, keys, strict=True)
    )
    warning = (
        f"The arms do not have the numbers of keys that the weights imply ({seen}), so the difference may come from users who are "
        "missing: find out why, an arm that cannot be loaded for example, and begin another test."
    )
    return [warning]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Lines:
    """The lines of the logs of one kind, sorted by key, then by time."""

    keys: NDArray[np.uint64]
    fields: NDArray[Any]
    left_out: int

    def first(self) -> _Lines:
        """Return the first line of each key."""
        first = np.ones(len(self.keys), dtype=bool)
        first[1:] = self.keys[1:] != self.keys[:-1]
        return replace(self, keys=self.keys[first], fields=self.fields[first])


def _lines(folder: Path, kind: str, field: str, dtype: pa.DataType) -> _Lines:
    """Read the logs of one kind; keep the key and one more field of each line."""
    reader = LogReader(folder, f"{kind}-*")
    schema = pa.schema([("at", pa.float64()), ("key", pa.string()), (field, dtype)])
    tables, lines = [schema.empty_table()], 0
    for block in reader.blocks():
        lines += block.count(b"\n")
        tables.append(_table(block, schema))
    table = pa.concat_tables(tables).combine_chunks()
    at_s, others = table["at"].to_numpy(), table[field].to_numpy()
    digits = "".join(table["key"].to_pylist())
    keys = np.frombuffer(bytes.fromhex(digits), dtype=">u8").astype(np.uint64)
    order = np.lexsort((at_s, keys))
    left_out = max(0, lines - table.num_rows) + reader.cut
    return _Lines(keys=keys[order], fields=others[order], left_out=left_out)


def _table(block: bytes, schema: pa.Schema) -> pa.Table:
    """Return the lines that have all fields, as columns."""
    options = pj.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")
    try:
        table = pj.read_json(io.BytesIO(block), parse_options=options)
    except pa.ArrowInvalid:  # a line is damaged: parse line by line
        rows = [row for row in objects_of(block) if _is_row(row, schema)]
        table = pa.Table.from_pylist(rows, schema=schema)
    table = table.drop_null()
    return table.filter(pc.match_substring_regex(table["key"], "^[0-9a-f]{16}$"))


def _is_row(row: Mapping[str, Any], schema: pa.Schema) -> bool:
    try:
        pa.Table.from_pylist([row], schema=schema)
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        return False
    return True


def _values(
    keys: NDArray[np.uint64], outcomes: _Lines
) -> tuple[NDArray[np.float64], NDArray[np.bool_], int]:
    """Return the value of each key, whether it has an outcome, and how many outcomes belong to other keys."""
    found, has_outcome = np.zeros(len(keys)), np.zeros(len(keys), dtype=bool)
    if not len(keys):
        return found, has_outcome, len(outcomes.keys)
    at = np.minimum(np.searchsorted(keys, outcomes.keys), len(keys) - 1)
    known = keys[at] == outcomes.keys
    np.add.at(found, at[known], outcomes.fields[known])
    has_outcome[at[known]] = True
    return found, has_outcome, int((~known).sum())
