"""Write docs/rollout.svg: a good release and one that is rolled back, as their clients saw them (2 minutes).

python benchmarks/rollout/picture.py [--out FILE]

A real server and 60 requests a second. Both lines are counted from the answers, by seconds in which they were sent.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from open_load import Answer, Client, Stream
from planted_models import HEALTHY, Planted, export
from releases import MEASURING_PER_S, newest_state, serving

from stoker.pages.html import Html, element
from stoker.pages.plot import Axis, line_plot, picture_file
from stoker.registry.repository import Repository
from stoker.rollout.operations import ModelRollouts
from stoker.rollout.state.settings import RolloutSettings
from stoker.rollout.state.state import Phase

MODEL, OUT = "taxi", Path(__file__).resolve().parents[2] / "docs" / "rollout.svg"
PER_S, LIMIT_S, AROUND_S = 60.0, 180.0, 8.0
BAD_SHARE = 20.0
SETTINGS = RolloutSettings(stages="10:8s,50:8s,100:6s", warm_up_s=0.0, min_requests=50)
WIDE_PX, HIGH_PX, BETWEEN_PX = 640, 130, 70
VERSIONS = {1: HEALTHY, 2: HEALTHY, 3: Planted(errors=BAD_SHARE)}

Event = tuple[float, str]
"""Seconds of the monotonic clock, and what happened then."""


async def release(stream: Stream, root: Path, version: int) -> list[Event]:
    """Start the rollout of a version, and wait for its end."""
    begun_s, events, seen = time.monotonic(), [], ""
    while time.monotonic() - begun_s < LIMIT_S:
        state = newest_state(root, MODEL)
        now = f"{state.share:.0%}" if state.phase is Phase.RUNNING else str(state.phase)
        if now != seen:
            events.append((time.monotonic(), f"version {version}: {now}"))
            seen = now
        stream.rate_per_s = MEASURING_PER_S if state.phase is Phase.MEASURING else PER_S
        if state.phase in (Phase.COMPLETED, Phase.ROLLED_BACK):
            await asyncio.sleep(AROUND_S)
            return events
        await asyncio.sleep(0.1)
    raise RuntimeError(f"version {version} did not end: {events}")


async def watched(folder: Path) -> tuple[list[Answer], list[Event]]:
    """All answers and events of a good release and a bad one."""
    repository = Repository(folder / "models")
    root, events = repository.root, list[Event]()
    paths = {n: export(folder / str(n), version=n, planted=each) for n, each in VERSIONS.items()}
    repository.push(paths[1], MODEL)
    ModelRollouts(root, MODEL).start(1, RolloutSettings(), why="first")
    with serving(root, folder / "log") as server:
        client = Client((server.port,), MODEL)
        stream = Stream(client=client, rate_per_s=PER_S)
        async with stream:
            for version in (2, 3):
                repository.push(paths[version], MODEL)
                ModelRollouts(root, MODEL).start(version, SETTINGS, why="")
                events += await release(stream, root, version)
        await client.settle(10.0)
        await client.close()
    return client.answers, events


def drawn(answers: Sequence[Answer], events: Sequence[Event]) -> str:
    """The picture: traffic share of the newer version above, errors below."""
    first_s = min(events)[0] - 2.0
    seconds = int(max(a.sent_s for a in answers) - first_s)
    begins_s = next(at for at, what in events if what.startswith("version 3"))

    def newer(answer: Answer) -> bool:
        if answer.sent_s < begins_s:
            return answer.version == 2
        return answer.version == 3 or answer.status != 200

    shares = _by_second(answers, newer, first_s, seconds)
    errors = _by_second(answers, lambda answer: answer.bad, first_s, seconds)
    # A stage of version 3 is too short for a label.
    marks = {
        "version 2: completed": "done",
        "version 3: measuring the baseline": "version 3 starts",
    }
    marks |= {f"version 2: {share}%": f"{share} %" for share in (10, 50, 100)}
    marks |= {"version 3: rolled back": "rolled back"}
    ticks = [((at - first_s) / seconds, marks[what]) for at, what in events if what in marks]
    every = [(at / seconds, str(at)) for at in range(0, seconds + 1, 10)]
    upper = line_plot(
        [(second / seconds, share) for second, share in shares],
        across=Axis(name="version 2, then version 3", ticks=ticks),
        up=Axis(name="traffic of it, %", ticks=[(y / 100, str(y)) for y in (0, 50, 100)]),
        size_px=(WIDE_PX, HIGH_PX),
        title="Share of the answers that the newer version gave",
    )
    most = 0.2
    lower = line_plot(
        [(second / seconds, min(1.0, share / most)) for second, share in errors],
        across=Axis(name="seconds", ticks=every),
        up=Axis(name="errors, %", ticks=[(y / 100 / most, str(y)) for y in (0, 10, 20)]),
        size_px=(WIDE_PX, HIGH_PX),
        title="Share of the answers that were errors",
    )
    return picture_file(_stacked(upper, lower), above=_lines(answers, events, newer))


def _by_second(
    answers: Sequence[Answer], counts: Callable[[Answer], bool], first_s: float, seconds: int
) -> list[tuple[float, float]]:
    found = []
    for second in range(seconds):
        mine = [a for a in answers if second <= a.sent_s - first_s < second + 1]
        if mine:
            found.append((second + 0.5, sum(map(counts, mine)) / len(mine)))
    return found


def _stacked(upper: Html, lower: Html) -> Html:
    height = _height(upper) + _height(lower) + 4
    return element(
        "svg",
        upper,
        element("g", lower, transform=f"translate(0,{_height(upper) + 4})"),
        class_="plot",
        width=WIDE_PX + 88,
        height=height,
        role="img",
        aria_label="Traffic share and error rate over time",
    )


def _height(picture: Html) -> int:
    found = re.search(r' height="(\d+)"', str(picture))
    return 0 if found is None else int(found[1])


def _lines(
    answers: Sequence[Answer], events: Sequence[Event], newer: Callable[[Answer], bool]
) -> list[str]:
    begins_s = next(at for at, what in events if what.startswith("version 3"))
    bad = [a for a in answers if a.bad]
    routed = [a.sent_s for a in answers if a.sent_s >= begins_s and newer(a)]
    took_s = max(routed) - min(a.sent_s for a in bad)
    return [
        "A good release, and one that is rolled back",
        (
            f"Version 3 fails for {BAD_SHARE:.0f} % of its requests: off the traffic {took_s:.0f} s after its "
            f"first error. {len(bad)} of {len(answers):,} answers were errors."
        ),
    ]


def main() -> None:
    """Run the releases and draw them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rollout-picture-") as folder:
        answers, events = asyncio.run(watched(Path(folder)))
    given.out.write_text(drawn(answers, events))
    sys.stdout.write(f"{given.out}: {len(answers)} answers\n")


if __name__ == "__main__":
    main()
