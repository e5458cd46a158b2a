"""Names, labels and annotations of a job's objects, and the addresses of its pods."""

from __future__ import annotations

import getpass
import re
from collections.abc import Mapping
from typing import Any

from stoker.jobs.job import ID_DIGITS, Job

MANAGED = "app.kubernetes.io/managed-by"
MANAGER = "stoker"
"""Label, with its value, of all objects of Stoker's jobs."""

NAME = "stoker/job"
"""Label of all objects and pods of a job; its value is the name of the job's objects."""

USER = "stoker/user"
"""Label; its value is the login name of the user who submitted the job."""

ID = "stoker/job-id"
"""Annotation; its value is the job's ID. An object with the same name and another ID belongs to another job."""

FOLDER = "stoker/folder"
"""Annotation; its value is the job's folder."""

WORKERS = "stoker/workers"
"""Annotation; its value is the number of workers."""

SUBMITTED = "stoker/submitted"
"""Annotation; its value is the time of the submission, seconds since the epoch."""

QUEUE = "kueue.x-k8s.io/queue-name"
"""Label that Kueue reads; its value is the LocalQueue of a job."""

MIN_PARALLELISM = "kueue.x-k8s.io/job-min-parallelism"
EQUAL_COMPLETIONS = "kueue.x-k8s.io/job-completions-equal-parallelism"
"""Annotations that Kueue reads. The first is the minimum number of pods with which it may admit a Job. The second
makes it reduce `completions` to the admitted number.
Source: Kueue, site/content/en/docs/reference/labels-and-annotations.md."""

REPLICATED = "worker"
"""Name of a JobSet's only group of pods; also the name of a TFJob's replicas, in lower case."""

CONTAINER = "tensorflow"
"""Name of the container in the pods; TFJob's operator requires this name."""

FIRST_PORT = 2222
"""Port of worker 0; worker N has this port plus N. TensorFlow's server binds all addresses of a machine, so if pods
use the host's network, two workers on the same node need different ports."""

_READABLE_CHARS = 30
"""Maximum length of a name: it leaves room for `-worker-0-9999`, because a pod's host name has at most 63
characters."""

_LABEL_CHARS = 63


def object_name(job_id: str) -> str:
    """Return the name of a job's objects: a DNS label that ends with the whole hash of the job's ID."""
    readable = re.sub(r"[^a-z0-9]+", "-", job_id[: -ID_DIGITS - 1].lower())[:_READABLE_CHARS]
    readable = readable.strip("-") or "job"
    if not readable[0].isalpha():
        readable = f"j-{readable}"[:_READABLE_CHARS].rstrip("-")
    return f"{readable}-{job_id[-ID_DIGITS:]}"


def user_label() -> str:
    """Return the value of the label of this process's user."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # the user has no entry in /etc/passwd
        name = "unknown"
    return re.sub(r"[^A-Za-z0-9._-]", "-", name)[:_LABEL_CHARS].strip("._-") or "unknown"


def labels(job: Job) -> dict[str, str]:
    """Return the labels of a job's objects."""
    return {**job.labels, MANAGED: MANAGER, NAME: object_name(job.id), USER: user_label()}


def selector(job_id: str) -> str:
    """Return the selector of the objects and pods of one job."""
    return f"{MANAGED}={MANAGER},{NAME}={object_name(job_id)}"


def pod_hosts(job: Job, kind: str) -> list[str]:
    """Return the host name of each pod in the cluster's own DNS, by rank."""
    name = object_name(job.id)
    stem = {"job": name, "jobset": f"{name}-{REPLICATED}-0", "tfjob": f"{name}-{REPLICATED}"}[kind]
    if kind == "tfjob":  # TFJob's operator creates a Service for each pod
        return [f"{stem}-{rank}" for rank in range(job.resources.workers)]
    return [f"{stem}-{rank}.{name}" for rank in range(job.resources.workers)]


def cluster_workers(job: Job, kind: str) -> list[str]:
    """Return `host:port` of each worker, by rank, as in TF_CONFIG."""
    return [f"{host}:{FIRST_PORT + rank}" for rank, host in enumerate(pod_hosts(job, kind))]


def notes_of(found: Mapping[str, Any]) -> dict[str, str]:
    """Return the annotations of an object that the API returned."""
    return dict(found.get("metadata", {}).get("annotations") or {})
