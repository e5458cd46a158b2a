"""Planted faults and healthy releases through a real server: how soon a fault is off the traffic (15 minutes).

python benchmarks/rollout/planted.py [--only errors,slow,...] [--results FOLDER]

Each release is a model of its own: version 1 serves, version 2 is pushed and rolled out under load. In faulty ones the
candidate gets 20 requests a second. The time is from the first request with a bad answer to the last request that
went to the candidate, both when they were sent. Faults that end or block the worker have a server of their own.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from planted_models import Planted
from releases import Ended, Release, prepare, roll_out, serving
from rollout_parts import RESULTS, Figure, figure, write_part

from stoker.registry.repository import Repository
from stoker.rollout.state.state import Phase

AT_ONCE = 3
"""Releases of one server at the same time."""

WITHIN_S = 60.0

ERRORS, SLOW, NANS, SHIFT = "errors on 10 %", "+100 ms", "NaN for 10 %", "predictions moved by 0.4"
HANG, CRASH = "hanging", "crash of the worker"
NAMES = {ERRORS: "errors", SLOW: "slow", NANS: "nan", SHIFT: "shift", HANG: "hang", CRASH: "crash"}
HEALTHY, RETRAINED, OUTAGE = "healthy", "retrained", "shared outage"

HALF, FIFTH, TENTH = ("50:60s,100", 40.0), ("20:60s,100", 100.0), ("10:60s,100", 200.0)
"""Stages and requests a second that give the candidate 20 requests a second."""


def _several(
    kind: str, planted: Sequence[Planted], stages: Sequence[tuple[str, float]]
) -> list[Release]:
    made = zip(planted, stages, strict=True)
    return [
        Release(
            name=f"{kind.split(maxsplit=1)[0].strip('+')}-{number}",
            kind=kind,
            candidate=each,
            stages=text,
            rate_per_s=rate,
        )
        for number, (each, (text, rate)) in enumerate(made)
    ]


def faults() -> list[Release]:
    """The releases that must be rolled back and leave the worker alive."""
    errors = _several(ERRORS, [Planted(errors=10.0)] * 4, [HALF, HALF, FIFTH, TENTH])
    errors[1] = replace(errors[1], baseline=Planted(errors=1.0), candidate=Planted(errors=11.0))
    return [
        *errors,
        *_several(SLOW, [Planted(delay_ms=100)] * 4, [HALF, HALF, FIFTH, FIFTH]),
        *_several(NANS, [Planted(nans=10.0)] * 3, [HALF, FIFTH, TENTH]),
        *_several(SHIFT, [Planted(shift=0.4)] * 3, [HALF, FIFTH, TENTH]),
    ]


def deadly() -> list[Release]:
    """The releases that must be rolled back and end or block the worker."""
    return [
        *_several(HANG, [Planted(hangs=each) for each in (10.0, 10.0, 100.0)], [HALF, FIFTH, HALF]),
        *_several(
            CRASH, [Planted(crashes=each) for each in (10.0, 10.0, 100.0)], [HALF, FIFTH, HALF]
        ),
    ]


def healthy() -> list[Release]:
    """The releases that must not be rolled back; those with an outage are in `shared`."""
    worn = Planted(errors=2.0)
    pairs = [
        *[(HEALTHY, Planted(), Planted())] * 4,
        *[(HEALTHY, worn, worn)] * 3,
        (HEALTHY, worn, Planted(errors=1.0)),
        (HEALTHY, Planted(delay_ms=20), Planted()),
        (HEALTHY, Planted(), Planted(shift=0.1)),
        *[(RETRAINED, Planted(retrained=n), Planted(retrained=n + 100)) for n in range(5)],
    ]
    return [_good(f"good-{at}", *pair) for at, pair in enumerate(pairs)]


def shared() -> list[Release]:
    """The releases whose clients send what both versions fail on, in half of the requests for 3 s of each stage.

    At 100 % and in the bake time no baseline answers next to the candidate.
    """
    pairs = [(OUTAGE, Planted(retrained=n), Planted(retrained=n + 200)) for n in range(5)]
    return [
        replace(_good(f"outage-{at}", *pair), outage=0.5, bake_s=5.0)
        for at, pair in enumerate(pairs)
    ]


def _good(name: str, kind: str, baseline: Planted, candidate: Planted) -> Release:
    return Release(
        name=name,
        kind=kind,
        baseline=baseline,
        candidate=candidate,
        stages="20:8s,50:8s,100",
        rate_per_s=60.0,
    )


async def run(
    releases: Sequence[Release], scratch: Path, name: str, *, at_once: int
) -> list[Ended]:
    """Roll out each in one server, several at the same time."""
    if not releases:
        return []
    repository, turn = Repository(scratch / name), asyncio.Semaphore(at_once)
    await asyncio.to_thread(prepare, repository, scratch / f"{name}-versions", releases)

    async def one(release: Release, port: int) -> Ended:
        async with turn:
            ended = await roll_out(
                release, port, repository=repository, scratch=scratch / f"{name}-versions"
            )
        _say(ended)
        return ended

    with serving(repository.root, scratch / f"{name}.log", "--max-run-s", "10") as server:
        ended = await asyncio.gather(*(one(release, server.port) for release in releases))
    return list(ended)


def _say(ended: Ended) -> None:
    sys.stderr.write(
        f"bench-rollout: {ended.release.name}: {ended.state.phase} after {ended.took_s:.0f} s, "
        f"{ended.to_last_s:.1f} s from the first bad answer; {ended.bad} bad of "
        f"{ended.candidate_answers} of the candidate, {ended.lost} others lost; {ended.state.reason}\n"
    )


def figures(ended: Sequence[Ended]) -> list[Figure]:
    """One for each kind of fault, and two for the healthy releases."""
    found = []
    for kind in (ERRORS, SLOW, NANS, SHIFT, HANG, CRASH):
        of_kind = [each for each in ended if each.release.kind == kind]
        if of_kind:
            found.append(_rollback(kind, of_kind))
    good = [each for each in ended if each.release.kind in (HEALTHY, RETRAINED, OUTAGE)]
    if good:
        kinds = {
            k: sum(each.release.kind == k for each in good) for k in (HEALTHY, RETRAINED, OUTAGE)
        }
        back = [each for each in good if each.state.phase is Phase.ROLLED_BACK]
        done = sum(each.state.phase is Phase.COMPLETED for each in good)
        how = f"{', '.join(f'{n} {kind}' for kind, n in kinds.items())}; {done} reached 100 %"
        how += "".join(f"; {each.release.name}: {each.state.reason}" for each in back)
        found.append(
            figure("healthy releases rolled back", len(back), "releases", at_most=0, how=how)
        )
        found.append(
            figure("healthy releases at 100 %", done, "releases", at_least=len(good), how=how)
        )
    return found


def _rollback(kind: str, of_kind: Sequence[Ended]) -> Figure:
    times = [each.to_last_s for each in of_kind]
    missed = any(math.isnan(each) for each in times)
    cases = [
        f"{each.release.stages.partition(':')[0]} %: {seconds:.1f} s, {each.bad} bad answers of "
        f"{each.candidate_answers}, {each.lost} others lost"
        for each, seconds in zip(of_kind, times, strict=True)
    ]
    found = figure(
        f"rollback, {kind}: slowest of {len(of_kind)}",
        0.0 if missed else max(times),
        "s",
        at_most=WITHIN_S,
        how="; ".join(cases),
    )
    return found | ({"value": None, "holds": False} if missed else {})


async def main() -> None:
    """Run all lanes at the same time, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only",
        default="",
        help="Only releases with one of these, separated by commas, in their name; nothing is written.",
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()
    ended: list[Ended] = []
    with tempfile.TemporaryDirectory(prefix="bench-rollout-") as folder:
        for name, releases, at_once in (
            ("faults", faults(), AT_ONCE),
            ("deadly", deadly(), 1),
            ("healthy", healthy(), AT_ONCE),
            ("shared", shared(), 5),
        ):
            chosen = [
                each
                for each in releases
                if any(part in each.name for part in given.only.split(","))
            ]
            ended += await run(chosen, Path(folder), name, at_once=at_once)
    if given.only:
        sys.stdout.write(
            "".join(f"{each['name']}: {each['value']}; {each['how']}\n" for each in figures(ended))
        )
    else:
        write_part("faults", figures(ended), results=given.results)


if __name__ == "__main__":
    asyncio.run(main())
