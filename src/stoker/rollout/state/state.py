"""The state of a model's rollout.

    start -> MEASURING -> RUNNING, stage 0 ... the last stage -> BAKING -> COMPLETED
                             |  ^                                  |
                          pause resume                             |
                             v  |                                  v
                           PAUSED --------- roll back ---------> ROLLED_BACK

    Too many bad answers at 100 %: back to the last stage with both versions

    A/B test:  TESTING -> COMPLETED or ROLLED_BACK

The functions in `changes` are the arrows. Once a model has a state, the state decides which version takes traffic;
without a state, the newest version does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import Any

from stoker.core.config import build
from stoker.core.errors import ConfigError, DataError, Plain
from stoker.rollout.split import TrafficSplit
from stoker.rollout.state.ab_settings import ABTestSettings, settings_of
from stoker.rollout.state.settings import RolloutSettings
from stoker.rollout.state.stages import Stage, parse_stages

FOLDER = ".rollout"
"""Name of the folder of a model's rollout, next to the versions."""


class Phase(StrEnum):
    """The phase of a rollout. While the baseline is measured, the candidate takes no traffic."""

    MEASURING = "measuring the baseline"
    RUNNING = "running"
    PAUSED = "paused"
    BAKING = "baking"
    COMPLETED = "completed"
    ROLLED_BACK = "rolled back"
    TESTING = "A/B test"


ACTIVE = (Phase.MEASURING, Phase.RUNNING, Phase.PAUSED, Phase.BAKING, Phase.TESTING)
"""Phases in which another rollout cannot start. Gates are judged in all of them except TESTING."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutState:
    """The state of a model's rollout."""

    rollout: int
    """Number of the rollout of this model, from 1; part of the salt that assigns keys to versions."""

    baseline: int
    """The version that served before the rollout."""

    candidate: int
    """The version that is rolled out."""

    settings: RolloutSettings

    began_s: float
    """When the stage, or the phase after the last stage, began: seconds since the epoch."""

    phase: Phase = Phase.MEASURING

    stage: int = 0
    """Index of the stage."""

    who: str = ""
    """The operator who started the rollout."""

    reason: str = ""
    """Why the rollout is paused or was rolled back."""

    previous: int = 0
    """The version that answers while the target of a rollback is loaded; 0: none."""

    rejected: tuple[int, ...] = ()
    """Versions that were rolled back; they take no traffic until an operator starts a rollout of them."""

    barred: tuple[int, ...] = ()
    """Versions that ended or blocked a worker: no server loads them, whatever label names them, until an operator starts them again."""

    slow_s: Mapping[str, float] = field(default_factory=dict)
    """Gate -> latency above which an answer is slow, seconds: the baseline's quantile plus a margin, fixed before stage
    0."""

    explained: tuple[int, int] = (0, 0)
    """Bad answers and requests of the candidate at 100 % that already led to `changes.compare_again`."""

    lease: int = 0
    """Number of the controller that may change the state."""

    test: ABTestSettings | None = None
    """Settings of the A/B test, kept after its end; None: this is a rollout in stages."""

    @property
    def current(self) -> Stage:
        """The current stage."""
        return parse_stages(self.settings.stages)[self.stage]

    @property
    def is_last_stage(self) -> bool:
        """Whether the current stage is the last one, which only the bake time follows."""
        return self.stage == len(parse_stages(self.settings.stages)) - 1

    @property
    def split_stage(self) -> int | None:
        """Index of the last stage in which both versions take traffic by weight; None if no stage does this."""
        stages = enumerate(parse_stages(self.settings.stages))
        split = [at for at, stage in stages if 0.0 < stage.share < 1.0 and not stage.waits]
        return split[-1] if split else None

    @property
    def is_active(self) -> bool:
        """Whether the rollout or test is running, so that another one cannot start."""
        return self.phase in ACTIVE

    @property
    def share(self) -> float:
        """The candidate's share of the traffic, in [0, 1]."""
        if self.phase in (Phase.RUNNING, Phase.PAUSED):
            return self.current.share
        return 1.0 if self.phase in (Phase.BAKING, Phase.COMPLETED) else 0.0

    @property
    def stable(self) -> int:
        """The version that takes all traffic if the rollout or test ends now."""
        return self.candidate if self.phase in (Phase.BAKING, Phase.COMPLETED) else self.baseline

    @property
    def is_test(self) -> bool:
        """Whether an A/B test is running."""
        return self.phase is Phase.TESTING

    @property
    def arms(self) -> dict[int, float]:
        """Version -> its share of the traffic."""
        if self.phase is Phase.TESTING and self.test is not None:
            return self.test.shares
        # A model's only version is baseline and candidate at once; it takes all traffic until the next push.
        return {self.baseline: 1.0 - self.share, self.candidate: self.share}

    @property
    def on_trial(self) -> set[int]:
        """The versions that are rolled back if they kill a worker or hang."""
        if not self.is_active:
            return set()
        return {*self.arms} - {self.baseline} if self.is_test else {self.candidate}

    def salt(self, model: str) -> str:
        """The salt of the traffic split: keys are assigned by it and by the weights."""
        return f"{model}/{self.rollout}"

    def facts(self, model: str) -> dict[str, Any]:
        """Return the facts about the rollout that the user's queries and Python gates receive."""
        return {"model": model, "candidate": self.candidate, "baseline": self.baseline}

    def split(self, model: str) -> TrafficSplit:
        """Return the traffic split between the versions."""
        return TrafficSplit(self.arms, salt=self.salt(model))

    def to_json(self) -> dict[str, Any]:
        """Return the fields as a JSON object."""
        return {
            **asdict(self),
            "settings": json.loads(json.dumps(asdict(self.settings))),
            "rejected": [*self.rejected],
            "barred": [*self.barred],
            "explained": [*self.explained],
            "slow_s": dict(self.slow_s),
            "test": None if self.test is None else self.test.to_json(),
        }


def state_of(content: Mapping[str, Any]) -> RolloutState:
    """Parse the result of `to_json`; unknown keys are left out.

    Raises:
        DataError: a newer Stoker wrote it, or it was edited by hand.
    """
    try:
        known = {
            each.name: content[each.name] for each in fields(RolloutState) if each.name in content
        }
        known["settings"] = build(RolloutSettings, known["settings"])
        known["phase"] = Phase(known["phase"])
        known["rejected"] = tuple(known["rejected"])
        known["barred"] = tuple(known.get("barred", ()))
        known["explained"] = tuple(known.get("explained", (0, 0)))
        known["test"] = settings_of(known["test"]) if known.get("test") else None
        return RolloutState(**known)
    except (KeyError, TypeError, ValueError, ConfigError) as error:
        raise DataError(
            "The state of the rollout cannot be read",
            got=Plain(f"{type(error).__name__}: {error}"),
            fix="Use the version of Stoker that wrote it, or a newer one.",
        ) from error
