"""How a rollout moves from stage to stage."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from stoker.core.errors import ConfigError, Plain
from stoker.rollout.http_call import check_url
from stoker.rollout.state.stages import parse_stages
from stoker.rollout.state.user_gates import UserGate
from stoker.rollout.state.webhook import Webhook
from stoker.rollout.statistics.evidence import ALLOWED_RATIO, ALPHA
from stoker.rollout.statistics.prediction_shift import MAX_SHIFT

BAD, SLOW_P99, SLOW_P50, SHIFT = "bad_answers", "slow_p99", "slow_p50", "prediction_shift"
BUILT_IN = (BAD, SLOW_P99, SLOW_P50, SHIFT)
"""Gates that every rollout has."""

_KEY = re.compile(r"(?:cookie:)?[A-Za-z0-9!#$&'*+.^_`|~-]+")
"""Syntax of the names of headers, gRPC metadata and cookies. Source: RFC 9110, `token`."""

_AT_LEAST_0 = (
    *("min_requests", "step_time_s", "warm_up_s", "bake_s"),
    *("inconclusive_limit_s", "load_limit_s", "keep_previous_s", "shadow_tolerance"),
)
"""Settings that may be any number from 0 up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutSettings:
    """How a rollout moves from stage to stage."""

    stages: str = "1,10,50,100"
    """The stages; see `parse_stages`."""

    key: str = ""
    """Header, metadata key or `cookie:NAME` by which a user stays with a version; empty: each request by itself."""

    step_time_s: float = 300.0
    """Shortest time of a stage that does not name its own, seconds."""

    min_requests: int = 500
    """Requests that the candidate must answer in a stage before the next one starts."""

    warm_up_s: float = 30.0
    """Time at the start of a stage in which latency is not judged, seconds."""

    bake_s: float = 0.0
    """Time after 100 % in which the gates still roll back, seconds."""

    allowed_ratio: float = ALLOWED_RATIO
    """Bad or slow answers of the candidate for each of the baseline's that still count as not worse."""

    alpha: float = ALPHA
    """Probability that a candidate that is not worse is rolled back."""

    max_shift: float = MAX_SHIFT
    """Largest accepted Kolmogorov distance between the predictions of both versions."""

    shadow_tolerance: float = 1e-3
    """Answers of a shadow stage are equal when each number differs by at most this times the larger of 1 and itself."""

    inconclusive_limit_s: float = 300.0
    """A gate without an answer for this long pauses the rollout, seconds."""

    strict: bool = False
    """Whether a gate without an answer rolls back instead of pausing."""

    dry_run: tuple[str, ...] = ()
    """Gates that are measured and shown, but have no effect."""

    load_limit_s: float = 600.0
    """Longest load of the version, seconds; a server that starts waits for it."""

    keep_previous_s: float = 1_800.0
    """How long the previous version stays loaded after 100 %, seconds."""

    servers: tuple[str, ...] = ()
    """REST addresses of servers that cannot write to the repository; the controller fetches their counts."""

    user_gates: tuple[UserGate, ...] = ()
    """Gates of the user: Prometheus queries and Python functions."""

    webhooks: tuple[Webhook, ...] = ()
    """Web services that are called before the rollout continues."""

    notify: tuple[str, ...] = ()
    """URLs that get each change as a message in Slack's form."""

    @property
    def gates(self) -> int:
        """Number of gates that share `alpha`."""
        return len(BUILT_IN) + len(self.user_gates)

    def __post_init__(self) -> None:
        parse_stages(self.stages)
        if self.key and not _KEY.fullmatch(self.key):
            raise ConfigError(
                "The key of a rollout must be the name of a header, or cookie:NAME",
                got=self.key,
                fix="For example x-user or cookie:uid.",
            )
        for server in self.servers:
            if not server.startswith(("http://", "https://")):
                raise ConfigError(
                    "A server of a rollout must be a REST address",
                    got=server,
                    fix="Write http://HOST:8501.",
                )
            check_url(server, where="A server of a rollout")
        for url in self.notify:
            check_url(url, where="A notification")
        names = [gate.name for gate in self.user_gates]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError("The names of gates must differ", got=twice[0])
        for name in _AT_LEAST_0:
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(
                    f"{name} must be a number of at least 0",
                    got=getattr(self, name),
                    fix="Set it to 0 or more.",
                )
        if (
            not 1.0 <= self.allowed_ratio < math.inf
            or not 0.0 < self.alpha < 1.0
            or not 0.0 < self.max_shift <= 1.0
        ):
            raise ConfigError(
                "allowed_ratio must be at least 1, alpha and max_shift between 0 and 1",
                got=Plain(f"{self.allowed_ratio:g}, {self.alpha:g}, {self.max_shift:g}"),
                fix="Leave them out to use the defaults.",
            )
