"""Translates errors of a cluster's API into the user's terms."""

from __future__ import annotations

import json
from typing import Any

from stoker.core.errors import ConfigError, Plain, UserError


class AnswerLost(UserError):
    """The cluster may or may not have done what was requested."""


class NotFound(UserError):
    """The object does not exist."""


class Conflict(UserError):
    """An object with this name exists already."""


class Gone(UserError):
    """The version from which the watch should continue is too old: list again."""


NOT_FOUND, CONFLICT, GONE, TOO_MANY = 404, 409, 410, 429
RETRIED = (TOO_MANY, 500, 502, 503, 504)
"""Status codes after which the same request may succeed."""

REPEAT = "Run the same command again: a job that was submitted is found, and not submitted twice."

_MESSAGES: tuple[tuple[str, str, str], ...] = (
    (
        "exceeded quota",
        "the job must be within the quota of its namespace",
        "Request less, wait until other jobs have ended, or see `kubectl describe resourcequota`.",
    ),
    (
        "must specify limits",
        "the job must set every resource that has a quota in its namespace",
        "Set cpus, memory_gib and ephemeral_gib of the target; see `kubectl describe resourcequota`.",
    ),
    (
        "must specify requests",
        "the job must set every resource that has a quota in its namespace",
        "Set cpus, memory_gib and ephemeral_gib of the target; see `kubectl describe resourcequota`.",
    ),
    (
        "violates PodSecurity",
        "pods must keep to the security level of the namespace",
        "Leave run_as_user and read_only_root of the target at their defaults, or ask the administrators.",
    ),
    (
        "no PriorityClass with name",
        "priority_class must exist in the cluster",
        "List them: kubectl get priorityclasses.",
    ),
    (
        "error looking up service account",
        "service_account must exist in the namespace",
        "List them: kubectl get serviceaccounts.",
    ),
    (
        "is forbidden: maximum memory usage",
        "a worker must be within the limits of the namespace",
        "Request less; see `kubectl describe limitrange`.",
    ),
)
"""Part of a message of the API or of an event; the rule and the remedy that the user is shown."""


def message_problem(message: str) -> tuple[str, str] | None:
    """Return rule and remedy for a message of the API or of an event; None if the message is not known."""
    for part, rule, fix in _MESSAGES:
        if part in message:
            return rule, fix
    return None


def problem(status: int, body: str, *, what: str, namespace: str) -> UserError:
    """Return the error to raise for an unsuccessful answer of the API.

    Args:
        status: HTTP status.
        body: Body of the answer.
        what: The request, e.g. `create Job trip-1234`.
        namespace: Namespace of the target.
    """
    said = _message(body) or f"HTTP {status}"
    if status == NOT_FOUND:
        return _not_found(said, what, namespace)
    if known := message_problem(said):
        return ConfigError(known[0], got=Plain(said), fix=known[1])
    kind: type[UserError] = {CONFLICT: Conflict, GONE: Gone}.get(status, UserError)
    rule, fix = _STATUS.get(status, (f"the cluster must accept the request to {what}", ""))
    if status in RETRIED:
        rule, fix = "the cluster's API must answer", f"It is overloaded or restarts. {REPEAT}"
        kind = AnswerLost
    return kind(rule, got=Plain(said), fix=fix)


_STATUS = {
    400: ("the cluster must accept the job's manifests", "`stoker submit --dry-run` prints them."),
    401: (
        "the credentials of the kubeconfig must be valid",
        "They may have expired: log in to the cluster again, e.g. as for kubectl, and repeat the command.",
    ),
    403: (
        "you must have the rights that jobs need",
        "docs/how-to/kubernetes-rbac.yaml is the smallest Role that works.",
    ),
    422: ("the cluster must accept the job's manifests", "`stoker submit --dry-run` prints them."),
}


def _not_found(said: str, what: str, namespace: str) -> UserError:
    if said.startswith("namespaces "):
        return ConfigError(
            "namespace must exist in the cluster",
            got=namespace,
            fix="Set `namespace` of the target, or create it: kubectl create namespace "
            f"{namespace}.",
        )
    return NotFound(f"the cluster must know what is requested: {what}", got=Plain(said))


def _message(body: str) -> str:
    """Return the message of a `Status` object, or, if a proxy has answered, the beginning of its answer."""
    try:
        value: Any = json.loads(body)
    except ValueError:
        return body.strip()[:200]
    return str(value.get("message", "")) if isinstance(value, dict) else ""
