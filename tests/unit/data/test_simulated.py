"""Simulated replacements of the real files have their columns, types, dirt and labels."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
from tests.simulated import WRITERS, write_taxi

from stoker.data.ingest import IngestConfig, describe_source


@pytest.fixture(scope="module")
def trips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("taxi") / "taxi.csv"
    write_taxi(path)
    return path


def shares(path: Path) -> dict[str, float]:
    """Shares and means that define the recipe's task."""
    with path.open(newline="", encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    fare, tips = (np.array([float(row[name]) for row in rows]) for name in ("fare", "tips"))
    card = np.array([row["payment_type"] == "Credit Card" for row in rows])
    big = (fare > 0) & (tips > 0.2 * fare)
    zero = [row["trip_miles"] != "" and float(row["trip_miles"]) == 0 for row in rows]
    found = {
        "big tips": big.mean(),
        "big tips by card": big[card].mean(),
        "big tips otherwise": big[~card].mean(),
        "big tips by card below 10 dollars": big[card & (fare < 10)].mean(),
        "big tips by card from 10 to 20": big[card & (fare >= 10) & (fare < 20)].mean(),
        "cards": card.mean(),
        "miles of 0": np.mean(zero),
        "fares of 0": (fare == 0).mean(),
        "fares over 40": (fare > 40).mean(),
        "whole numbers": np.mean(["." not in row["tips"] for row in rows]),
    }
    found |= {f"{name} missing": np.mean([not row[name] for row in rows]) for name in rows[0]}
    return {name: float(value) for name, value in found.items()}


def test_simulated_trips_are_the_same_every_time(trips: Path, tmp_path: Path) -> None:
    write_taxi(tmp_path / "again.csv")

    assert (tmp_path / "again.csv").read_bytes() == trips.read_bytes()


def test_simulated_trips_have_the_real_dirt_and_label_logic(trips: Path, shared_data: Path) -> None:
    real, simulated = shares(shared_data / "taxi.csv"), shares(trips)

    assert list(simulated) == list(real)
    for name, share in real.items():
        assert simulated[name] == pytest.approx(share, abs=0.06), name


@pytest.mark.parametrize("name", sorted(WRITERS))
def test_simulated_files_have_the_real_columns(
    name: str, tmp_path: Path, shared_data: Path
) -> None:
    WRITERS[name](tmp_path / name)

    real, simulated = (
        describe_source(IngestConfig(source=str(folder / name)))
        for folder in (shared_data, tmp_path)
    )
    assert [each.column for each in simulated.columns] == [each.column for each in real.columns]
    assert simulated.bad == real.bad == 0
    assert simulated.rows == pytest.approx(real.rows, rel=0.01)
