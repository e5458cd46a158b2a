"""The facts that the manifests give a pod, in one environment variable."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from stoker.core.config import build
from stoker.core.errors import ConfigError, Plain

FACTS = "STOKER_KUBERNETES"
"""Environment variable: the facts, as JSON."""

FIRST = ("tensorflow", "keras", "stoker")
"""The most important packages, in the order in which a pod reports differing versions."""

CODE_FOLDER = "/stoker/code"
"""Where the ConfigMap with the code and the job's description is mounted."""

FAILURES = "failures"
"""Folder in the job's folder: a file for each start that failed, where the cluster does not count starts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """Facts that are the same for all pods of a job."""

    place: str
    """The job's folder."""

    kind: str
    """`job`, `jobset` or `tfjob`: what restarts a pod, and after which exit codes."""

    python: str
    """Python that has Stoker."""

    workers: tuple[str, ...]
    """`host:port` of each worker, by rank."""

    grace_s: int
    """Time for a save, seconds."""

    start_s: int
    """Longest wait for all pods of a start, seconds."""

    max_restarts: int
    """How many starts may fail, if the cluster does not count starts."""

    min_workers: int | None = None
    """Fewest workers of a start, if the job's queue may admit fewer pods; None: all are required."""

    code_from: str = ""
    """A commit of git or a folder of a bucket that has the code; empty: the volume or a ConfigMap has it."""

    time_limit_s: float | None = None
    """Longest run of one start, seconds."""

    versions: dict[str, str] = field(default_factory=dict)
    """Package -> version that the image should have."""

    versions_from: str = "the submission"
    """Source of the versions: the name of a lock file, or `the submission`."""

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
            fix="Manifests of `stoker submit` set it: this program runs in their pods only.",
        )
    return build(Facts, json.loads(text), where=FACTS)
