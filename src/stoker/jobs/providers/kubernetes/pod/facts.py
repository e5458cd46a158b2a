"""What the manifests tell a pod, as one environment variable."""

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
"""Packages whose versions decide most, in the order in which a pod names those that differ."""

CODE_FOLDER = "/stoker/code"
"""Where the ConfigMap with the code and the job's description is mounted."""

FAILURES = "failures"
"""Folder in the job's folder: a file for each start that failed, where the cluster does not count starts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What is the same for all pods of a job."""

    place: str
    """The job's folder."""

    kind: str
    """`job`, `jobset` or `tfjob`: who starts a pod again, and after which exit codes."""

    python: str
    """Python that has Stoker."""

    workers: tuple[str, ...]
    """`host:port` of each worker, by rank."""

    grace_s: int
    """Time for a save, seconds."""

    start_s: int
    """Longest wait for all pods of a start, seconds."""

    max_restarts: int
    """How many starts may fail, where the cluster does not count starts."""

    min_workers: int | None = None
    """Fewest workers of a start, where the job's queue may admit fewer pods; None: all must come."""

    code_from: str = ""
    """A commit of git or a folder of a bucket: where the code comes from, if neither from the volume nor from a ConfigMap."""

    time_limit_s: float | None = None
    """Longest run of one start, seconds."""

    versions: dict[str, str] = field(default_factory=dict)
    """Package -> version that the image should have."""

    versions_from: str = "the submission"
    """Where they are from: the name of a lock file, or `the submission`."""

    def to_json(self) -> dict[str, Any]:
        """Return them as JSON values."""
        return asdict(self)


def read_facts(environ: Mapping[str, str]) -> Facts:
    """Return the facts of this pod.

    Raises:
        ConfigError: they are not in the environment.
    """
    text = environ.get(FACTS)
    if text is None:
        raise ConfigError(
            f"{FACTS} must be set",
            got=Plain("nothing"),
            fix="Manifests of `stoker submit` set it: this program runs in their pods only.",
        )
    return build(Facts, json.loads(text), where=FACTS)
