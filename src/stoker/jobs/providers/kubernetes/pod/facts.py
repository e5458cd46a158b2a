"""The facts that the manifests pass to a pod in an environment variable."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from stoker.core.config import build
from stoker.core.errors import ConfigError, Plain

FACTS = "STOKER_KUBERNETES"
"""Environment variable with the facts as JSON."""

FIRST = ("tensorflow", "keras", "stoker")
"""The most important packages: if their versions in the image differ, a pod reports them first, in this order."""

CODE_FOLDER = "/stoker/code"
"""Path at which the ConfigMap with the code and the job's description is mounted."""

FAILURES = "failures"
"""Folder inside the job's folder with a file for each failed start. Used if the cluster does not count starts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """Facts that are the same for all pods of a job."""

    place: str
    """The job's folder."""

    kind: str
    """`job`, `jobset` or `tfjob`; the kind decides after which exit codes pods are restarted."""

    python: str
    """Path of the Python that has Stoker installed."""

    workers: tuple[str, ...]
    """`host:port` of each worker, by rank."""

    grace_s: int
    """Time for a save, seconds."""

    start_s: int
    """Maximum wait for all pods of a start, seconds."""

    max_restarts: int
    """Maximum number of failed starts; used if the cluster does not count starts."""

    min_workers: int | None = None
    """Minimum number of workers of a start, if the job's queue may admit fewer pods; None: all workers are
    required."""

    code_from: str = ""
    """A git commit or a bucket's folder with the code; empty: the code is on the volume or in a ConfigMap."""

    time_limit_s: float | None = None
    """Maximum time that the job runs each time it is started or restarted, seconds."""

    versions: dict[str, str] = field(default_factory=dict)
    """Package -> the version that the image should have."""

    versions_from: str = "the submission"
    """Where the versions come from: the name of a lock file, or `the submission`."""

    def to_json(self) -> dict[str, Any]:
        """Return the facts as JSON values."""
        return asdict(self)


def read_facts(environ: Mapping[str, str]) -> Facts:
    """Read the facts of this pod.

    Raises:
        ConfigError: the environment does not contain them.
    """
    text = environ.get(FACTS)
    if text is None:
        raise ConfigError(
            f"{FACTS} must be set",
            got=Plain("nothing"),
            fix="The manifests of `stoker submit` set it: this program runs only in their pods.",
        )
    return build(Facts, json.loads(text), where=FACTS)
