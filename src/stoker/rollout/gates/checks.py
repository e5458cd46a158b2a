"""Checks a rollout's gates before the rollout starts."""

from __future__ import annotations

import logging

from stoker.core.config import nearest
from stoker.core.errors import ConfigError
from stoker.rollout.gates.prometheus import check_query
from stoker.rollout.state.settings import BUILT_IN, RolloutSettings
from stoker.rollout.state.state import RolloutState

_log = logging.getLogger(__name__)


def check_names(settings: RolloutSettings) -> None:
    """Refuse a user's gate that has a built-in gate's name, and a dry run of an unknown gate.

    Raises:
        ConfigError: a name is taken, or unknown.
    """
    own = [gate.name for gate in settings.user_gates]
    if taken := sorted(set(own) & set(BUILT_IN)):
        raise ConfigError(
            "A gate must not have the name of a built-in gate", got=taken[0], fix="Rename it."
        )
    known = [*BUILT_IN, *own]
    if unknown := sorted(set(settings.dry_run) - set(known)):
        raise ConfigError(
            f"{unknown[0]!r} is not a gate", got=unknown[0], fix=nearest(unknown[0], known)
        )


def check_queries(model: str, begun: RolloutState) -> None:
    """Let Prometheus check the syntax of the queries. If it does not answer, log that the gate is inconclusive.

    Raises:
        ConfigError: a query is not valid PromQL.
    """
    for gate in begun.settings.user_gates:
        if gate.prometheus:
            query = gate.question(**begun.facts(model))
            silent = check_query(gate.prometheus, query, gate=gate.name, timeout_s=gate.timeout_s)
            if silent:
                _log.warning(
                    "gate %s is inconclusive until Prometheus answers (%s)", gate.name, silent
                )
