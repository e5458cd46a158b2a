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
"""Part of the message of a Job that failed through a user error; with the space, as 20 is another code.

Source: Kubernetes, pkg/controller/job/pod_failure_policy.go: "Container %s for pod %s/%s failed with exit code %v
matching %v rule at index %d".
"""


def indexed_job(job: Job, target: KubernetesTarget, *, has_code: bool) -> dict[str, Any]:
    """Return the specification of an Indexed Job, which replaces single pods.

    Pods that were evicted or have saved are replaced without a limit. The others of the same start notice that
    one of them is gone and also end, to be replaced (`pod.start`).

    `max_restarts` counts starts, but `backoffLimit` counts pods (Kubernetes, "Pod backoff failure policy"): with
    `max_restarts`, one start whose workers all exceed their memory would use it up, and with 0, as in the Job of a
    JobSet, which counts starts itself, no worker could ever fail. So the pods count starts (`pod.main`), and this
    limit covers the worst case: all workers of each start are killed, and cannot count.
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
            # No pod of the next start runs while one of the previous start still saves.
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
    """Return the specification of a TFJob; its operator replaces pods that end with a code from 128 on."""
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
    """Return a specification, or a patch, that says whether the job may have pods."""
    if kind == "tfjob":
        return spec | {"runPolicy": spec.get("runPolicy", {}) | {"suspend": value}}
    return spec | {"suspend": value}


_DISRUPTED = {"onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
"""The pod was preempted, evicted, or lost with its node."""


def _on_code(code: int) -> dict[str, Any]:
    # Without the empty list, the schema of 1.28 refuses the rule; the server itself accepts both.
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
