"""Checked answers while versions come and go and processes are killed.

Two servers of one repository behind a client that goes to the other one where a connection is refused. Operators start,
promote and roll back, and `kill -9` takes workers and whole servers. Each answer names its version, its value depends on
the version, and each user must get the version that the state in force assigns to it, before and after each kill.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import random
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from open_load import LOST, Answer, Client
from planted_models import Planted, export
from releases import Server, free_port, serving

from stoker.core.errors import UserError
from stoker.registry.repository import Repository
from stoker.rollout.operations import ModelRollouts
from stoker.rollout.split import TrafficSplit
from stoker.rollout.state.changes import advance, promote_fully
from stoker.rollout.state.settings import RolloutSettings
from stoker.rollout.state.state import RolloutState

MODEL = "m"
AT_ONCE = 8
"""Requests under way at the same time."""

SPREAD_S = 4.0
"""A server may answer by the state before for this long: it reads the state every second, and kills take their time."""

LOAD_S = 2 * SPREAD_S
"""After a rollback to a version that is not loaded, the old baseline may answer for this long."""

KILLED_S = 0.25
"""A request that is sent so soon after a kill may still reach a connection of the killed process."""

READY_S = 120.0
VERSIONS = (1, 2, 3)
SETTINGS = RolloutSettings(
    stages="10,50,100",
    key="x-user",
    step_time_s=36_000.0,
    dry_run=("slow_p99", "slow_p50", "prediction_shift"),
)
"""Operators promote; the gates on latency and on predictions, which differ on purpose, have no effect."""


@dataclass
class Fleet:
    """Two servers of one repository, that may be killed."""

    root: Path
    scratch: Path
    servers: list[Server] = field(default_factory=list)
    kills: list[tuple[float, float]] = field(default_factory=list)
    """When a process was killed, and when it was gone, by the monotonic clock."""

    _stack: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Self:
        """Start both."""
        for _ in range(2):
            self._start(free_port())
        return self

    def __exit__(self, *_: object) -> None:
        """End all."""
        self._stack.close()

    @property
    def ports(self) -> tuple[int, ...]:
        """Of both."""
        return tuple(server.port for server in self.servers)

    def _start(self, port: int) -> None:
        log = self.scratch / f"{port}-{len(self.kills)}.log"
        flags = ("--rest_api_port", str(port))
        self.servers.append(self._stack.enter_context(serving(self.root, log, *flags)))

    async def kill_worker(self, at: int) -> None:
        """Kill the process that answers; its parent starts another."""
        await self._all_listen()
        await self._kill(self.servers[at].workers())

    async def kill_server(self, at: int, *, again: bool = True) -> None:
        """Kill a server with its workers, and start another on its port."""
        await self._all_listen()
        server = self.servers.pop(at)
        # Its workers end with it, a little later.
        await self._kill([server.process.pid], until_gone=server.workers())
        server.process.wait()
        if again:
            await asyncio.to_thread(self._start, server.port)

    async def _kill(self, processes: Sequence[int], until_gone: Sequence[int] = ()) -> None:
        begun_s = time.monotonic()
        for process in processes:
            os.kill(process, signal.SIGKILL)
        await asyncio.to_thread(_wait_for_end, until_gone or processes)
        self.kills.append((begun_s, time.monotonic()))

    async def _all_listen(self) -> None:
        """A kill while the other server is down would leave none."""
        until_s = time.monotonic() + READY_S
        while time.monotonic() < until_s:
            clients = [Client((port,), MODEL) for port in self.ports]
            answers = [await client.ask(1.0) for client in clients]
            for client in clients:
                await client.close()
            if all(each.status == 200 for each in answers):
                return
            await asyncio.sleep(0.2)
        raise RuntimeError(f"not all listen: {answers}")


def _wait_for_end(processes: Sequence[int]) -> None:
    while any(Path(f"/proc/{each}").exists() for each in processes):
        time.sleep(0.01)


@dataclass(frozen=True, kw_only=True)
class InForce:
    """A state, and when servers may have answered by it, by the monotonic clock."""

    state: RolloutState
    from_s: float
    until_s: float
    split: TrafficSplit

    def version_of(self, key: str) -> int:
        """The version for a user."""
        if self.state.phase.value in ("running", "paused"):
            return self.split.version_of(key.encode())
        return self.state.stable


def in_force(rollouts: ModelRollouts) -> list[InForce]:
    """All states, with the time that it takes until each server has read the next one."""
    offset_s = time.time() - time.monotonic()
    history = [(event.at_s - offset_s, state) for event, state in rollouts.history()]
    nexts = [at_s + SPREAD_S for at_s, _ in history[1:]]
    return [
        InForce(state=state, from_s=at_s, until_s=until_s, split=state.split(MODEL))
        for (at_s, state), until_s in zip(history, [*nexts, math.inf], strict=True)
    ]


@dataclass(kw_only=True)
class Checked:
    """What became of all answers."""

    answers: int = 0
    wrong: list[Answer] = field(default_factory=list)
    """A status other than 200, a value of another version, or a version that the state does not assign."""

    lost: list[Answer] = field(default_factory=list)
    """Without an answer although no process was killed meanwhile."""

    killed: int = 0
    """Without an answer because their process was killed."""

    by_version: dict[int, int] = field(default_factory=dict)
    kills: int = 0


def check(
    answers: Sequence[Answer],
    states: Sequence[InForce],
    kills: Sequence[tuple[float, float]],
) -> Checked:
    """Compare each answer with what the states in force say."""
    found = Checked(answers=len(answers), kills=len(kills))
    for answer in answers:
        end_s = answer.sent_s + answer.took_s
        if answer.status == LOST:
            if any(answer.sent_s - KILLED_S <= gone and begun <= end_s for begun, gone in kills):
                found.killed += 1
            else:
                found.lost.append(answer)
            continue
        allowed = {
            each.version_of(answer.key)
            for each in states
            if each.from_s <= end_s and answer.sent_s <= each.until_s
        }
        allowed |= {
            each.state.previous
            for each in states
            if each.from_s <= end_s and answer.sent_s <= each.from_s + LOAD_S
        }
        if answer.version not in allowed or abs(answer.value - value(answer)) > 1e-4:
            found.wrong.append(answer)
        if answer.version is not None:
            found.by_version[answer.version] = found.by_version.get(answer.version, 0) + 1
    return found


def value(answer: Answer) -> float:
    """What the version that an answer names must answer."""
    return math.nan if answer.version is None else answer.x / 100.0 + 1.0 + answer.version


def prepare(root: Path, scratch: Path) -> ModelRollouts:
    """Push all versions; the first one takes all traffic."""
    repository = Repository(root)
    for version in VERSIONS:
        path = export(scratch / str(version), version=version, planted=Planted(shift=version))
        repository.push(path, MODEL)
        if version == 1:
            ModelRollouts(root, MODEL).start(1, SETTINGS, why="first")
    return ModelRollouts(root, MODEL)


Action = Callable[[], Awaitable[None]]


def actions(rollouts: ModelRollouts, fleet: Fleet) -> list[Action]:
    """What operators and kills do, one after the other."""

    def start(version: int) -> Action:
        return _operation(lambda: rollouts.start(version, SETTINGS, why=""))

    def promote() -> Action:
        step = lambda now: advance(now, now_s=time.time())  # noqa: E731 - a change of the state
        return _operation(lambda: rollouts.apply(step, what="promote", why=""))

    def promote_all() -> Action:
        step = lambda now: promote_fully(now, now_s=time.time())  # noqa: E731 - a change of the state
        return _operation(lambda: rollouts.apply(step, what="promote", why=""))

    def back(to: int | None = None) -> Action:
        return _operation(lambda: rollouts.roll_back(to=to, why=""))

    return [
        start(2),
        lambda: fleet.kill_worker(0),
        promote(),
        lambda: fleet.kill_server(0),
        promote(),
        lambda: fleet.kill_worker(1),
        back(),
        lambda: fleet.kill_server(1),
        start(3),
        promote(),
        lambda: fleet.kill_worker(0),
        back(),
        start(2),
        promote_all(),
        lambda: fleet.kill_server(0),
        start(3),
        lambda: fleet.kill_worker(1),
        promote(),
        back(1),
    ]


def _operation(work: Callable[[], object]) -> Action:
    async def run() -> None:
        # A kill may be laid to the version that the worker ran: then its rollout is over already.
        with contextlib.suppress(UserError):
            await asyncio.to_thread(work)

    return run


async def ask_while(
    fleet: Fleet, rollouts: ModelRollouts, steps: Sequence[Action], *, answers: int
) -> Checked:
    """Ask all the time while the steps are taken, one after each share of the answers.

    Args:
        fleet: the servers.
        rollouts: of the model.
        steps: in their order.
        answers: that must have come at the end, at least.
    """
    client, over = Client(fleet.ports, MODEL), asyncio.Event()

    async def ask() -> None:
        while not over.is_set():
            user = random.randrange(1_000)  # noqa: S311 - a load
            # A request to a server whose worker was killed waits for the next one.
            await client.ask(float(user % 100), key=f"user-{user}", timeout_s=READY_S)

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(ask())
        for number, step in enumerate([*steps, None]):
            enough = len(client.answers) + answers // (len(steps) + 1) + 1
            while len(client.answers) < enough:  # noqa: ASYNC110 - others count
                await asyncio.sleep(0.05)
            if step is not None:
                await step()
                sys.stderr.write(f"bench-rollout: step {number}, {len(client.answers)} answers\n")
        over.set()
    await client.close()
    return check(client.answers, in_force(rollouts), fleet.kills)
