"""One release of a planted model through a real server: what became of it, and who was answered by what."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from open_load import LOST, Answer, Client, Stream
from planted_models import HEALTHY, OPERATIONS, Planted, export

from stoker.registry.repository import Repository
from stoker.rollout.operations import ModelRollouts
from stoker.rollout.state.files import StateFiles
from stoker.rollout.state.settings import RolloutSettings
from stoker.rollout.state.state import FOLDER, Phase, RolloutState, state_of

START_S = 180.0
"""Longest until a server listens."""

LOOK_S = 0.1
"""Between two looks at the state."""

MEASURING_PER_S = 100.0
"""Requests a second while the baseline is measured."""

OUTAGE_S = 3.0
"""How long an outage lasts."""

SETTLE_S = 3.0
"""How long the load goes on after the end, to see the last answer of the version."""


@dataclass
class Server:
    """A `stoker serve` and its workers."""

    process: subprocess.Popen[str]
    port: int
    log: Path

    def workers(self) -> list[int]:
        """Process numbers of the workers."""
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(each) for each in path.read_text().split()]


def free_port() -> int:
    """A port of 127.0.0.1 that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serving(root: Path, log: Path, *flags: str) -> Iterator[Server]:
    """Serve a repository on a free port of 127.0.0.1.

    Args:
        root: the repository.
        log: file for what the server says.
        flags: more options of `stoker serve`.
    """
    allowed = [part for name in OPERATIONS for part in ("--allow-ops", name)]
    command = [sys.executable, "-m", "stoker", "serve", str(root), "--rest_api_port", "0"]
    command += ["--port", "0", "--json", "--poll-s", "0.2", *allowed, *flags]
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=output, text=True, env=_quiet()
        )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"no server:\n{log.read_text()[-3000:]}")
        yield Server(process=process, port=json.loads(line)["rest_port"], log=log)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _quiet() -> dict[str, str]:
    return {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"}


@dataclass(frozen=True, kw_only=True)
class Release:
    """A version that is rolled out."""

    name: str
    """Of the model, and of the case."""

    kind: str
    candidate: Planted = HEALTHY
    baseline: Planted = HEALTHY
    stages: str = "50:60s,100"
    rate_per_s: float = 40.0
    """Requests a second while the candidate takes traffic."""

    outage: float = 0.0
    """Share of the requests that are errors of both versions, from the first begin of each stage on for `OUTAGE_S`."""

    bake_s: float = 0.0
    """Time after 100 % in which the gates still roll back, seconds."""

    dry_run: tuple[str, ...] = ()
    """Gates without effect. Without both gates on latency, the baseline is not measured first."""

    min_requests: int = 100

    def settings(self) -> RolloutSettings:
        """Of the rollout."""
        return RolloutSettings(
            stages=self.stages,
            step_time_s=5.0,
            warm_up_s=0.0,
            bake_s=self.bake_s,
            min_requests=self.min_requests,
            dry_run=self.dry_run,
        )

    def is_bad(self, answer: Answer) -> bool:
        """Whether an answer shows the planted fault."""
        seen = self._concerns(answer.x) and answer.bad
        always = self.candidate.delay_ms > 0 or self.candidate.shift > 0
        return seen or (always and answer.version == 2)

    def is_of_candidate(self, answer: Answer) -> bool:
        """Whether the candidate gave an answer, or must have failed to: the baseline answers what failed."""
        return answer.version == 2 or (self._concerns(answer.x) and answer.bad)

    def _concerns(self, x: float) -> bool:
        return self.candidate.concerns(x) and not self.baseline.concerns(x)


@dataclass(kw_only=True)
class Ended:
    """What became of a release."""

    release: Release
    state: RolloutState
    answers: list[Answer]
    took_s: float = 0.0
    to_last_s: float = field(init=False, default=math.nan)
    """From the first bad answer to the last request that went to the candidate, both when they were sent."""

    def __post_init__(self) -> None:
        """Measure it."""
        bad = [a.sent_s for a in self.answers if self.release.is_bad(a)]
        routed = [a.sent_s for a in self.answers if self.release.is_of_candidate(a)]
        if bad and self.state.phase is Phase.ROLLED_BACK:
            self.to_last_s = max(routed) - min(bad)

    @property
    def bad(self) -> int:
        """Bad answers of the candidate."""
        return sum(map(self.release.is_bad, self.answers))

    @property
    def candidate_answers(self) -> int:
        """Answers of the candidate."""
        return sum(map(self.release.is_of_candidate, self.answers))

    @property
    def lost(self) -> int:
        """Requests that ended without an answer although the baseline had to give one."""
        gone = [a for a in self.answers if a.status == LOST]
        return sum(not self.release.is_bad(a) for a in gone)


def prepare(repository: Repository, scratch: Path, releases: Sequence[Release]) -> None:
    """Push the first version of each model, which takes all traffic, and write the second one."""
    written: dict[tuple[int, Planted], Path] = {}
    for release in releases:
        for version, planted in ((1, release.baseline), (2, release.candidate)):
            if (version, planted) not in written:
                path = scratch / f"{version}-{len(written)}"
                written[version, planted] = export(path, version=version, planted=planted)
        repository.push(written[1, release.baseline], release.name)
        ModelRollouts(repository.root, release.name).start(1, RolloutSettings(), why="first")
    for release in releases:
        (scratch / release.name).symlink_to(written[2, release.candidate])


def newest_state(root: Path, model: str) -> RolloutState:
    """The state of a model's rollout now."""
    stored = StateFiles(root / model / FOLDER).latest()
    assert stored is not None
    return state_of(stored.content["state"])


async def roll_out(
    release: Release,
    port: int,
    *,
    repository: Repository,
    scratch: Path,
    limit_s: float = 120.0,
) -> Ended:
    """Push the second version of a prepared model, start its rollout, and ask until that ends.

    Args:
        release: of a model that `prepare` has made.
        port: of the server.
        repository: that it serves.
        scratch: where `prepare` wrote the versions.
        limit_s: longest that it may take.
    """
    begun_s, model, root = time.monotonic(), release.name, repository.root
    stages, down_until_s = set[tuple[Phase, int]](), 0.0
    repository.push((scratch / model).resolve(), model)
    ModelRollouts(root, model).start(2, release.settings(), why=release.kind)
    client = Client((port,), model)
    stream = Stream(client=client, rate_per_s=MEASURING_PER_S)
    async with stream:
        while time.monotonic() - begun_s < limit_s:
            state = newest_state(root, model)
            if state.phase in (Phase.ROLLED_BACK, Phase.COMPLETED):
                break
            measuring = state.phase is Phase.MEASURING
            stream.rate_per_s = MEASURING_PER_S if measuring else release.rate_per_s
            if not measuring and (state.phase, state.stage) not in stages:
                stages.add((state.phase, state.stage))
                down_until_s = state.began_s + OUTAGE_S
            stream.outage = release.outage if time.time() < down_until_s else 0.0
            await asyncio.sleep(LOOK_S)
        stream.outage = 0.0
        await asyncio.sleep(SETTLE_S)
    took_s = time.monotonic() - begun_s
    await client.settle(0.0 if release.candidate.hangs else 35.0)
    await client.close()
    return Ended(release=release, state=state, answers=client.answers, took_s=took_s)
