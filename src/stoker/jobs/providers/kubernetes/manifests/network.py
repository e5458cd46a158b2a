"""How the pods of a job find each other, and which other pods can reach them."""

from __future__ import annotations

from typing import Any

from stoker.jobs.job import Job
from stoker.jobs.providers.kubernetes.names import NAME, object_name


def service(job: Job) -> dict[str, Any]:
    """Return the specification of the headless Service that gives each pod a host name; JobSets do not need it."""
    # Publish addresses of pods that are not ready: pods must find each other before they can become ready.
    return {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {NAME: object_name(job.id)},
    }


def network_policy(job: Job) -> dict[str, Any]:
    """Return the specification of a NetworkPolicy: only pods of the job can reach the job's pods."""
    pods = {"podSelector": {"matchLabels": {NAME: object_name(job.id)}}}
    return pods | {"policyTypes": ["Ingress"], "ingress": [{"from": [pods]}]}


def disruption_budget(job: Job) -> dict[str, Any]:
    """Return the specification of a PodDisruptionBudget that allows no eviction."""
    return {"maxUnavailable": 0, "selector": {"matchLabels": {NAME: object_name(job.id)}}}
