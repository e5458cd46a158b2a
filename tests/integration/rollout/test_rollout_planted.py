"""Six planted faults under load through one real server: each is rolled back, and the baseline answers on.

`make test` has the four that leave the worker alive.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from planted_models import Planted
from releases import Ended, Release, Server, prepare, roll_out, serving

from stoker.registry.repository import Repository
from stoker.rollout.state.state import Phase

LATENCY = ("slow_p99", "slow_p50")


def release(name: str, fault: Planted, *, dry_run: tuple[str, ...] = LATENCY) -> Release:
    """Half of 60 requests a second, in stages of 2 s that end after 500 requests of the candidate."""
    return Release(
        name=name,
        kind=name,
        candidate=fault,
        stages="50:2s,100:2s",
        rate_per_s=60.0,
        dry_run=dry_run,
        min_requests=500,
    )


BY_COUNTS = [
    release("errors", Planted(errors=20.0)),
    release("nan", Planted(nans=20.0)),
    release("shift", Planted(shift=0.6)),
    release("slow", Planted(delay_ms=100), dry_run=()),
]
HANG = release("hang", Planted(hangs=30.0))
CRASH = release("crash", Planted(crashes=30.0))
GATES: dict[str, str | tuple[str, ...]] = {
    "errors": "bad_answers",
    "nan": "bad_answers",
    "shift": "prediction_shift",
    "slow": ("slow_p", "bad_answers"),  # on a slow machine, answers also come too late
}


@dataclass
class Setting:
    """A server of all models."""

    server: Server
    repository: Repository
    scratch: Path

    async def roll_out(self, each: Release) -> Ended:
        return await roll_out(
            each, self.server.port, repository=self.repository, scratch=self.scratch, limit_s=60.0
        )


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setting]:
    folder = tmp_path_factory.mktemp("planted")
    repository, scratch = Repository(folder / "models"), folder / "versions"
    prepare(repository, scratch, [*BY_COUNTS, HANG, CRASH])
    flags = ("--max-run-s", "10", "--rest_api_timeout_in_ms", "5000")
    with serving(repository.root, folder / "log", *flags) as server:
        yield Setting(server, repository, scratch)


def test_errors_nan_a_shift_and_a_delay_are_rolled_back_by_their_gates(setting: Setting) -> None:
    async def all_of() -> list[Ended]:
        return list(await asyncio.gather(*map(setting.roll_out, BY_COUNTS)))

    for ended in asyncio.run(all_of()):
        name = ended.release.name
        assert ended.state.phase is Phase.ROLLED_BACK, name
        assert ended.state.reason.startswith(GATES[name]), (name, ended.state.reason)
        assert 0.0 < ended.to_last_s < 45.0
        assert ended.lost == 0
        # Clients got no more bad answers than the candidate's share of the traffic.
        assert 0 < ended.bad <= ended.candidate_answers < 0.7 * len(ended.answers)


@pytest.mark.soak  # in `make test`, test_rollout_parent has the same faults without a load
def test_a_version_that_hangs_is_rolled_back(setting: Setting) -> None:
    ended = asyncio.run(setting.roll_out(HANG))
    assert ended.state.phase is Phase.ROLLED_BACK
    assert ended.state.rejected == (2,)
    assert 0.0 < ended.to_last_s < 45.0


@pytest.mark.soak
def test_a_version_that_kills_its_worker_is_off_the_traffic_before_the_next_one_listens(
    setting: Setting,
) -> None:
    ended = asyncio.run(setting.roll_out(CRASH))
    assert ended.state.phase is Phase.ROLLED_BACK
    assert ended.state.rejected == (2,)
    # Requests that got no answer until the next worker listened concern both versions; the baseline answered.
    assert 0.0 < ended.to_last_s < 45.0
