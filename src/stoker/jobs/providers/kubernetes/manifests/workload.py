"""The object that runs the pods: an Indexed Job, a JobSet or a TFJob, and how each restarts after a failure."""

from __future__ import annotations

from typing import Any

from stoker.core.errors import EXIT_PREEMPTED, EXIT_USER
from stoker.jobs.job import Job
from stoker.jobs.providers.kubernetes.manifests.pod import pod_template
from stoker.jobs.providers.kubernetes.names import REPLICATED, object_name
from stoker.jobs.providers.kubernetes.settings import KubernetesTarget

VERSIONS = {"job": "batch/v1", "jobset": "jobset.x-k8s.io/v1alpha2", "tfjob": "kubeflow.org/v1"}
KINDS = {"job": "Job", "jobset": "JobSet", "tfjob": "TFJob"}
PLURALS = {"job": "jobs", "jobset": "jobsets", "tfjob": "tfjobs"}

FINAL_MESSAGE = f"exit code {EXIT_USER} "
"""Part of the message of a Job that failed with the exit code of a user error. It ends with a space, so that code 2
does not match code 20.

Source: Kubernetes, pkg/controller/job/pod_failure_policy.go: "Container %s for pod %s/%s failed with exit code %v
matching %v rule at index %d".
"""


def indexed_job(job: Job, target: KubernetesTarget, *, has_code: bool) -> dict[str, Any]:
    """Return the specification of an Indexed Job, which replaces each failed pod separately.

    Pods that were evicted or have saved are replaced without a limit. The other pods of the same start notice that a
    pod is gone, and also end, to be replaced (`pod.start`).

    `max_restarts` is a number of starts, but `backoffLimit` is a number of pods (Kubernetes, "Pod backoff failure
    policy"). If it were equal to `max_restarts`, a single start in which all workers exceed their memory could use it
    up. So the pods themselves count the starts (`pod.main`), and `backoffLimit` is the number for the worst case: in
    each start all workers are killed, so that none of them can count the start.
    """
    workers = job.resources.workers
    rules = [
        {"action": "FailJob", **_on_code(EXIT_USER)},
        {"action": "Ignore", **_DISRUPTED},
        {"action": "Ignore", **_on_code(EXIT_PREEMPTED)},
    ]
    limit = target.max_restarts * workers
    spec = _job_spec(job, target, "job", rules, has_code=has_code)
    return spec | {"backoffLimit": limit, "ttlSecondsAfterFinished": target.keep_s}


def jobset(job: Job, target: KubernetesTarget, *, has_code: bool) -> dict[str, Any]:
    """Return the specification of a JobSet, which restarts all pods together."""
    rules = [
        {"action": "FailJob", **_DISRUPTED},
        {"action": "FailJob", **_on_code(EXIT_PREEMPTED)},
        {"action": "FailJob", **_on_code(EXIT_USER)},
    ]
    spec = _job_spec(job, target, "jobset", rules, has_code=has_code)
    return {
        "network": {
            "enableDNSHostnames": True,
            "publishNotReadyAddresses": True,
            "subdomain": object_name(job.id),
        },
        "failurePolicy": {
            "maxRestarts": target.max_restarts,
            # No pod of the next start runs while a pod of the previous start still saves.
            "restartStrategy": "BlockingRecreate",
            "rules": [
                {
                    "name": "final",
                    "action": "FailJobSet",
                    "onJobFailureMessagePatterns": [FINAL_MESSAGE],
                },
                {
                    "name": "preempted",
                    "action": "RestartJobSetAndIgnoreMaxRestarts",
                    "onJobFailureReasons": ["PodFailurePolicy"],
                },
                {"name": "failed", "action": "RestartJobSet"},
            ],
        },
        "replicatedJobs": [
            {
                "name": REPLICATED,
                "replicas": 1,
                "template": {"spec": spec | {"backoffLimit": 0}},
            }
        ],
        "ttlSecondsAfterFinished": target.keep_s,
    }


def tfjob(job: Job, target: KubernetesTarget, *, has_code: bool) -> dict[str, Any]:
    """Return the specification of a TFJob; its operator replaces pods whose exit code is 128 or more."""
    return {
        "successPolicy": "AllWorkers",
        "runPolicy": {
            "cleanPodPolicy": "Running",
            "ttlSecondsAfterFinished": target.keep_s,
        },
        "tfReplicaSpecs": {
            "Worker": {
                "replicas": job.resources.workers,
                "restartPolicy": "ExitCode",
                "template": pod_template(job, target, "tfjob", has_code=has_code),
            }
        },
    }


SPECIFICATIONS = {"job": indexed_job, "jobset": jobset, "tfjob": tfjob}


def suspended(spec: dict[str, Any], kind: str, *, value: bool) -> dict[str, Any]:
    """Return a specification or a patch with the field that suspends a job: a suspended job has no pods."""
    if kind == "tfjob":
        return spec | {"runPolicy": spec.get("runPolicy", {}) | {"suspend": value}}
    return spec | {"suspend": value}


_DISRUPTED = {"onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
"""Condition of a failure policy: the pod was preempted, evicted, or lost with its node."""


def _on_code(code: int) -> dict[str, Any]:
    # The schema of Kubernetes 1.28 requires `onPodConditions`, even if it is empty; the server accepts the rule
    # without it.
    return {"onExitCodes": {"operator": "In", "values": [code]}, "onPodConditions": []}


def _job_spec(
    job: Job, target: KubernetesTarget, kind: str, rules: list[dict[str, Any]], *, has_code: bool
) -> dict[str, Any]:
    workers = job.resources.workers
    return {
        "completionMode": "Indexed",
        "completions": workers,
        "parallelism": workers,
        "podFailurePolicy": {"rules": rules},
        "template": pod_template(job, target, kind, has_code=has_code),
    }
