"""Write docs/slurm.svg: a training of four workers on a real Slurm, preempted in its middle (3 minutes).

python benchmarks/jobs/picture.py [--out FILE]

Everything in it is read from the files of the run: the logs of its workers, and the steps that its callback noted.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))  # `tests`

from local_slurm import local_slurm
from tests.slurm_ends import PARTITION, open_partitions, preempt
from tests.slurm_training import Training, write_experiment

from stoker.jobs.places import read_submitted
from stoker.jobs.provider import Phase
from stoker.pages.html import Html, element
from stoker.pages.plot import picture_file

OUT = Path(__file__).resolve().parents[2] / "docs" / "slurm.svg"
WORKERS, STEPS_BEFORE, URGENT_S = 4, 40, 8.0
EPOCHS, ROWS, EVERY_STEPS = 6, 1600, 20

ROW_PX, BAR_PX, LABEL_PX, WIDE_PX, LEGEND_PX = 30, 20, 90, 620, 50

WAITS, STARTS, STEPS, SAVES, URGENT = "waits", "starts", "steps", "saves", "another job"
COLORS = {WAITS: "track", STARTS: "s7", STEPS: "s2", SAVES: "s0", URGENT: "s1"}

_LINE = re.compile(r"(?P<at>\S+Z) (?P<text>.*)")
_START = re.compile(r"start (?P<number>\d+) on ")
_END = re.compile(r"start (?P<number>\d+): the command ")


@dataclass(frozen=True, kw_only=True)
class Bar:
    """What a worker did for a while."""

    lane: str
    kind: str
    begin_s: float
    end_s: float


def run(training: Training) -> None:
    """Train, with a job of higher priority in the middle."""
    training.slow()
    training.submit()
    training.wait_for_step(STEPS_BEFORE)
    preempt(training, random.Random(), length_s=URGENT_S)  # noqa: S311 - it draws nothing
    state = training.wait_for_end()
    if state.phase is not Phase.DONE or state.restarts != 1:
        raise RuntimeError(f"{state}\n{training.log()}")


def bars_of(training: Training) -> list[Bar]:
    """Everything that happened, of all workers and of the other job."""
    submitted = read_submitted(training.place)
    if submitted is None:
        raise RuntimeError("the job was not submitted")
    found = []
    for rank in range(WORKERS):
        found += _of_worker(training, rank, submitted.submitted_s)
    begin_s, end_s = map(float, (training.notes / "urgent").read_text().split())
    return [*found, Bar(lane=URGENT, kind=URGENT, begin_s=begin_s, end_s=end_s)]


def _of_worker(training: Training, rank: int, before_s: float) -> Iterator[Bar]:
    lane, steps = f"worker {rank}", training.steps(rank)
    for number, (begin_s, signal_s, end_s) in _starts(training, rank).items():
        mine = [each.at_s for each in steps if each.start == number]
        stop_s = min(signal_s, end_s)
        yield Bar(lane=lane, kind=WAITS, begin_s=before_s, end_s=begin_s)
        yield Bar(lane=lane, kind=STARTS, begin_s=begin_s, end_s=mine[0])
        yield Bar(lane=lane, kind=STEPS, begin_s=mine[0], end_s=min(stop_s, max(mine)))
        if signal_s < end_s:
            yield Bar(lane=lane, kind=SAVES, begin_s=signal_s, end_s=end_s)
        before_s = end_s


def _starts(training: Training, rank: int) -> dict[int, tuple[float, float, float]]:
    """Start -> when the worker began, got the signal to end, and ended; infinite without a request."""
    found, now = dict[int, tuple[float, float, float]](), 0
    never = float("inf")
    log = training.place / "logs" / f"task-{rank}.log"
    for line in filter(None, map(_LINE.match, log.read_text().splitlines())):
        at_s, text = datetime.fromisoformat(line["at"]).timestamp(), line["text"]
        if begun := _START.match(text):
            now = int(begun["number"])
            found[now] = at_s, never, never
        elif text.startswith("ending on a signal"):
            found[now] = found[now][0], at_s, never
        elif _END.match(text):
            found[now] = *found[now][:2], at_s
    return found


def drawn(bars: Sequence[Bar], training: Training) -> str:
    """The picture."""
    first_s, last_s = min(bar.begin_s for bar in bars), max(bar.end_s for bar in bars)
    lanes = list(dict.fromkeys(bar.lane for bar in bars))
    high = ROW_PX * len(lanes)

    def at(moment_s: float) -> float:
        return LABEL_PX + WIDE_PX * (moment_s - first_s) / (last_s - first_s)

    parts = []
    for second in range(0, int(last_s - first_s) + 1, 10):
        x = at(first_s + second)
        parts.append(element("line", x1=x, x2=x, y1=0, y2=high))
        parts.append(element("text", str(second), x=x, y=high + 16, text_anchor="middle"))
    parts.append(element("text", "s", x=LABEL_PX + WIDE_PX + 14, y=high + 16, text_anchor="middle"))
    for row, lane in enumerate(lanes):
        parts.append(element("text", lane, x=0, y=ROW_PX * row + 18))
    for bar in bars:
        y = ROW_PX * lanes.index(bar.lane) + (ROW_PX - BAR_PX) / 2
        width = max(1.0, at(bar.end_s) - at(bar.begin_s))
        shape = {"x": at(bar.begin_s), "y": y, "width": width, "height": BAR_PX}
        parts.append(element("rect", class_=COLORS[bar.kind], **shape))
    parts += _legend(high + 34)
    whole = element(
        "svg",
        *parts,
        class_="plot",
        width=LABEL_PX + WIDE_PX + 26,
        height=high + LEGEND_PX,
        role="img",
        aria_label="What each worker did, over time",
    )
    return picture_file(whole, above=_lines(bars, training))


def _legend(y: float) -> list[Html]:
    parts = []
    for place, (kind, color) in enumerate(COLORS.items()):
        x = LABEL_PX + 110 * place
        parts.append(element("rect", x=x, y=y, width=12, height=12, class_=color))
        parts.append(element("text", kind, x=x + 18, y=y + 10))
    return parts


def _lines(bars: Sequence[Bar], training: Training) -> list[str]:
    saves = [bar.end_s - bar.begin_s for bar in bars if bar.kind == SAVES]
    lost = max(training.lost_steps(rank)[1] for rank in range(WORKERS))
    numbers = [each.number for each in training.steps()]
    first = sum(each.start == 1 for each in training.steps())
    return [
        "Four workers make room for a job of higher priority",
        (
            f"Preempted after step {first} of {max(numbers)}, they save within {max(saves):.1f} s and go on "
            f"when the other job is done; steps done twice: {lost}."
        ),
    ]


def main() -> None:
    """Run the training and draw it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args()
    with local_slurm() as (cluster, folder):
        open_partitions(cluster)
        write_experiment(folder / "pair", rows=ROWS, epochs=EPOCHS, every_steps=EVERY_STEPS)
        settings = {"partition": PARTITION, "nodes": 2}
        training = Training(
            cluster, folder / "pair", folder / "preempted", workers=WORKERS, settings=settings
        )
        run(training)
        given.out.write_text(drawn(bars_of(training), training))
    sys.stdout.write(f"{given.out}\n")


if __name__ == "__main__":
    main()
