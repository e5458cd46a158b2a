"""Simulated taxi trips, with the columns, the dirt and the label logic of Chicago's open data.

The real file (tensorflow/tfx, examples/chicago_taxi_pipeline/data/simple) is not part of this
repository. Rates below are rounded from its 15,002 rows; no row of it is copied.
"""

from __future__ import annotations

import csv
import datetime as dt
from pathlib import Path
from typing import Any

import numpy as np

TRIPS = 15_000
SEED = 20_130_101

COLUMNS = (
    "pickup_community_area", "fare", "trip_start_month", "trip_start_hour", "trip_start_day",
    "trip_start_timestamp", "pickup_latitude", "pickup_longitude", "dropoff_latitude",
    "dropoff_longitude", "trip_miles", "pickup_census_tract", "dropoff_census_tract",
    "payment_type", "company", "trip_seconds", "dropoff_community_area", "tips",
)  # fmt: skip
"""In the real file's order."""

BUSY_AREAS = {  # community area -> share of trips, latitude, longitude
    8: (0.33, 41.900, -87.633), 32: (0.23, 41.881, -87.627), 28: (0.09, 41.874, -87.664),
    6: (0.08, 41.944, -87.656), 76: (0.06, 41.980, -87.914), 7: (0.06, 41.922, -87.649),
    24: (0.04, 41.901, -87.676), 33: (0.02, 41.857, -87.620), 3: (0.02, 41.966, -87.656),
    56: (0.012, 41.793, -87.770),
}  # fmt: skip
OTHER_AREAS = 77
"""Areas are numbered from 1 to this; the remaining trips are spread evenly over all of them."""

PAYMENTS = {  # kind -> share of trips
    "Cash": 0.6605, "Credit Card": 0.3316, "No Charge": 0.0054, "Unknown": 0.0019,
    "Dispute": 0.0004, "Pcard": 0.0001, "Prcard": 0.0001,
}  # fmt: skip
COMPANIES = {  # name -> share of trips; the names of the rest are missing or a driver's own
    "Taxi Affiliation Services": 0.345, "Dispatch Taxi Affiliation": 0.109,
    "Blue Ribbon Taxi Association Inc.": 0.073, "Choice Taxi Association": 0.058,
    "Northwest Management LLC": 0.037, "KOAM Taxi Association": 0.016,
    "Top Cab Affiliation": 0.009, "Chicago Elite Cab Corp. (Chicago Carriag": 0.002,
    "Chicago Medallion Leasing INC": 0.0015, "Chicago Medallion Management": 0.001,
    "": 0.343,
}  # fmt: skip
HOURS = (
    60,
    54,
    42,
    29,
    20,
    14,
    19,
    30,
    53,
    66,
    69,
    62,
    75,
    70,
    74,
    72,
    76,
    83,
    94,
    101,
    97,
    84,
    84,
    73,
)
"""Relative number of trips that start in each hour."""

Row = dict[str, Any]

NO_DROPOFF = {
    "dropoff_latitude": "",
    "dropoff_longitude": "",
    "dropoff_community_area": "",
    "dropoff_census_tract": "",
}
NO_PICKUP = {"pickup_latitude": "", "pickup_longitude": "", "pickup_community_area": ""}
DIRT: tuple[tuple[float, Row], ...] = (
    (0.27, {"trip_miles": 0.0}),
    (0.0002, {"trip_miles": 1710.0}),
    (0.032, {"trip_seconds": 0}),
    (0.0004, {"trip_seconds": ""}),
    (0.0018, {"fare": 0.0}),
    (0.0001, {"fare": 700.07}),
    (0.26, {"dropoff_census_tract": ""}),
    (0.0016, {"dropoff_community_area": ""}),
    (0.0322, NO_DROPOFF),
    (0.0002, NO_PICKUP),
)
"""Share of the trips, and the recorded value that replaces the true one."""


def write_trips(path: Path) -> None:
    """Write a header and 15,000 simulated trips as CSV, always the same ones."""
    rng = np.random.Generator(np.random.PCG64(SEED))
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, COLUMNS)
        writer.writeheader()
        for number in range(TRIPS):
            trip = _with_dirt(_trip(rng), rng)
            if number == TRIPS // 2:
                trip["pickup_census_tract"] = 17031081401  # as in the real file: one trip only
            writer.writerow(trip)


def _trip(rng: np.random.Generator) -> Row:
    """The true trip: places, time, distance, fare and tip."""
    pickup = _area(rng)
    # A third of the trips stay in their area.
    dropoff = pickup if rng.random() < 0.33 else _area(rng)
    (south, west), (north, east) = _place(pickup), _place(dropoff)
    # Degrees to miles at Chicago's latitude; streets are not straight lines.
    straight = float(np.hypot(69.0 * (north - south), 51.5 * (east - west)))
    miles = 1.2 * straight + float(rng.gamma(2.0, 0.35))
    minutes = 3.0 + 2.3 * miles * float(rng.lognormal(0.0, 0.3))
    # Fares are 3.25 and steps of 0.20.
    fare = 3.25 + 0.2 * round((1.5 * miles + 0.15 * minutes) / 0.2)
    payment = _pick(rng, PAYMENTS)
    return {
        "pickup_community_area": pickup,
        "dropoff_community_area": dropoff,
        **_start(rng),
        "pickup_latitude": south,
        "pickup_longitude": west,
        "dropoff_latitude": north,
        "dropoff_longitude": east,
        "trip_miles": round(miles, 1),
        "trip_seconds": 60 * round(minutes),
        "dropoff_census_tract": 17031000000 + 10000 * dropoff + 100 * int(rng.integers(1, 5)),
        "fare": round(fare, 2),
        "pickup_census_tract": "",
        "payment_type": payment,
        "company": _company(rng),
        "tips": _tip(rng, fare=fare, payment=payment),
    }


def _tip(rng: np.random.Generator, *, fare: float, payment: str) -> float:
    """The recorded tip: mostly of card payments; whole dollars or a share of the fare.

    Two dollars are more than 20 % for a short trip and less for a medium one. On long trips, paid
    by the terminal's buttons, most tips are a little above 20 % of the fare.
    """
    if payment == "Unknown":
        return 2.0 if rng.random() < 0.27 else 0.0
    if payment != "Credit Card":
        return 2.0 if payment == "Cash" and rng.random() < 0.0004 else 0.0
    if rng.random() < 0.05:
        return 0.0
    by_share = rng.random() < (0.3 if fare < 10 else 0.45 if fare < 22 else 0.9)
    if by_share:
        share = float(
            rng.choice([0.15, 0.18, 0.21, 0.23, 0.26, 0.31], p=[0.12, 0.08, 0.4, 0.2, 0.1, 0.1])
        )
        return round(share * fare, 2)
    dollars = [1.0, 2.0, 3.0] if fare < 10 else [2.0, 3.0, 5.0]
    return float(rng.choice(dollars, p=[0.15, 0.68, 0.17] if fare < 10 else [0.77, 0.16, 0.07]))


def _with_dirt(trip: Row, rng: np.random.Generator) -> Row:
    """The recorded trip: missing values, zeros, outliers, two ways to write a number."""
    for chance, recorded in DIRT:
        if rng.random() < chance:
            trip |= recorded
    if rng.random() < 0.03:  # another system's export: whole numbers without a point
        for name in ("fare", "trip_miles", "tips"):
            trip[name] = int(trip[name]) if trip[name] == int(trip[name]) else trip[name]
    return trip


def _area(rng: np.random.Generator) -> int:
    """A community area: mostly one of the busy ones."""
    point = rng.random()
    for area, (share, _, _) in BUSY_AREAS.items():
        point -= share
        if point < 0:
            return area
    return int(rng.integers(1, OTHER_AREAS + 1))


def _place(area: int) -> tuple[float, float]:
    """Latitude and longitude of an area's center; those of quiet areas are invented."""
    if area in BUSY_AREAS:
        return BUSY_AREAS[area][1:]
    return round(41.70 + 0.0123 * (area * 7 % 25), 6), round(-87.80 + 0.0111 * (area * 11 % 23), 6)


def _start(rng: np.random.Generator) -> Row:
    """Start time, rounded to quarter hours, from 2013 to 2016. Day 1 is Sunday."""
    first = dt.datetime(2013, 1, 1, tzinfo=dt.UTC)
    while True:
        day = first + dt.timedelta(days=int(rng.integers(0, 4 * 365)))
        # Fridays and Saturdays have a quarter more trips.
        if day.weekday() in (4, 5) or rng.random() < 0.8:
            break
    weights = np.array(HOURS, float)
    hour = int(rng.choice(24, p=weights / weights.sum()))
    start = day + dt.timedelta(hours=hour, minutes=15 * int(rng.integers(0, 4)))
    return {
        "trip_start_timestamp": int(start.timestamp()),
        "trip_start_month": start.month,
        "trip_start_day": start.isoweekday() % 7 + 1,
        "trip_start_hour": hour,
    }


def _company(rng: np.random.Generator) -> str:
    name = _pick(rng, COMPANIES)
    if name is None:
        number = int(rng.integers(1, 51))
        return f"{100 * number:04d} - {10_000 + 777 * number} Driver {number}"
    return name


def _pick(rng: np.random.Generator, shares: dict[str, float]) -> Any:
    """A random name by its share; None for the rest to 1."""
    point = rng.random()
    for name, share in shares.items():
        point -= share
        if point < 0:
            return name
    return None
