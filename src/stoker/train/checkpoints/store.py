"""One checkpoint on disk: a folder that is published atomically, verified, and found again.

step-0000001234/
  state.safetensors  every variable
    facts.json         state of the run: epoch, position, metrics, callbacks
    manifest.json      size and SHA-256 of the other two files, and its own hash; written last
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from stoker.core.errors import DataError, Plain
from stoker.core.files import publish_folder, scratch_folder, sha256_file, write_atomic
from stoker.train.checkpoints.identity import Identity
from stoker.train.checkpoints.tensors import Arrays, read_tensors, write_tensors

STATE = "state.safetensors"
"""File with the values of the variables."""

FACTS = "facts.json"
"""File with the rest of the run's state: JSON with Python's extension `Infinity`, which callbacks use."""

MANIFEST = "manifest.json"
"""Name of the manifest, whose presence makes a checkpoint complete."""

FORMAT = 1
"""Version of a checkpoint's layout."""

_NAME = re.compile(r"step-(\d{10,})(?:\.(\d+))?")
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Best:
    """The checkpoint with the best monitored value so far."""

    name: str
    """Name of the checkpoint's folder."""

    value: float
    """The monitored value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The manifest of a checkpoint."""

    step: int
    """Number of steps done."""

    sizes: dict[str, int]
    """File -> its size, bytes."""

    hashes: dict[str, str]
    """File -> SHA-256 of its content."""

    identity: dict[str, dict[str, Any]]
    """Configuration, code, data and versions of the run."""

    best: Best | None
    """The best checkpoint so far, including this one; None before the first monitored value."""

    elapsed_s: float
    """Training time of the run, over all its processes, seconds."""

    written: str
    """Date and time of writing, for people only."""

    format: int = FORMAT
    """Version of the checkpoint's layout."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DamagedCheckpoint:
    """A checkpoint that must not be used."""

    path: Path
    """Its folder."""

    why: str
    """What is wrong with it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifiedCheckpoint:
    """A checkpoint whose bytes have all been verified."""

    path: Path
    """Its folder."""

    manifest: Manifest
    """Its manifest."""

    facts: dict[str, Any]
    """The state that was stored with the variables."""

    refused: tuple[DamagedCheckpoint, ...] = ()
    """Newer checkpoints, which are damaged; newest first."""

    @property
    def step(self) -> int:
        """Number of steps done."""
        return self.manifest.step

    @property
    def identity(self) -> Identity:
        """The identity of the run."""
        return self.manifest.identity

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return name -> value of each variable, memory-mapped from the file."""
        return read_tensors(self.path / STATE)


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointContent:
    """The content of a checkpoint that will be written."""

    arrays: Arrays
    """Name -> value of each variable."""

    facts_text: str
    """The rest of the run's state, as JSON."""

    step: int
    """Number of steps done. If this step has a checkpoint already, the new one gets the next free name."""

    identity: Identity
    """The identity of the run."""

    best: float | Best | None
    """Monitored value of this checkpoint if it is the best one so far; else the earlier best one."""

    elapsed_s: float
    """Training time of the run, seconds."""


def write_checkpoint(folder: Path, content: CheckpointContent) -> VerifiedCheckpoint:
    """Write a checkpoint, and publish it with a single rename.

    Args:
        folder: Folder of all checkpoints.
        content: Content of the checkpoint.

    Raises:
        OSError: A write or an fsync failed; nothing is published or left behind.
    """
    best, facts_text = content.best, content.facts_text
    final = _free_name(folder, content.step)
    with scratch_folder(final) as made:
        write_atomic(made / FACTS, facts_text)
        hashes = {FACTS: _sha256(facts_text), STATE: write_tensors(made / STATE, content.arrays)}
        manifest = Manifest(
            step=content.step,
            sizes={name: (made / name).stat().st_size for name in hashes},
            hashes=hashes,
            identity={part: dict(names) for part, names in content.identity.items()},
            best=Best(name=final.name, value=best) if isinstance(best, float) else best,
            elapsed_s=content.elapsed_s,
            written=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        write_atomic(made / MANIFEST, _sealed(asdict(manifest)))
        publish_folder(made, final)
    return VerifiedCheckpoint(path=final, manifest=manifest, facts=json.loads(facts_text))


def newest_good(folder: Path) -> VerifiedCheckpoint | None:
    """Return the newest checkpoint that is intact; None if there is no checkpoint.

    The log and `VerifiedCheckpoint.refused` name newer checkpoints that are damaged.

    Raises:
        DataError: All checkpoints are damaged; the run must not silently start from the beginning.
    """
    refused: list[DamagedCheckpoint] = []
    for path in reversed(places(folder)):
        try:
            return replace(open_checkpoint(path), refused=tuple(refused))
        except DataError as error:
            refused.append(DamagedCheckpoint(path=path, why=error.line()))
            _LOG.warning("%s Trying the previous checkpoint.", error.line())
    if refused:
        raise DataError(
            f"all {len(refused)} checkpoints in {folder} are damaged",
            got=Plain("; ".join(f"{each.path.name}: {each.why}" for each in refused)),
            fix=f"Delete {folder} to train from the beginning, or restore one from a backup.",
        )
    return None


def best(folder: Path) -> VerifiedCheckpoint:
    """Return the checkpoint with the best monitored value, or the newest one without values; for export.

    Raises:
        DataError: The checkpoint is missing or damaged.
    """
    newest = newest_good(folder)
    if newest is None:
        raise DataError(
            f"{folder} must hold a checkpoint",
            got=Plain("none"),
            fix="Run `stoker train`.",
        )
    if newest.manifest.best is None or newest.manifest.best.name == newest.path.name:
        return newest
    return open_checkpoint(folder / newest.manifest.best.name)


def places(folder: Path) -> list[Path]:
    """Return the folders of all checkpoints, including damaged ones, oldest first."""
    found = [path for path in folder.glob("step-*") if _NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: _order(path.name))


def open_checkpoint(path: Path) -> VerifiedCheckpoint:
    """Read a checkpoint and verify every byte.

    Raises:
        DataError: The checkpoint is damaged; the error says how.
    """
    manifest = read_manifest(path)
    for name, expected in manifest.hashes.items():
        if _size(path / name) != manifest.sizes[name] or _hash(path / name) != expected:
            raise _damaged(path, f"{name} is not what was written")
    facts = json.loads((path / FACTS).read_text())
    return VerifiedCheckpoint(path=path, manifest=manifest, facts=facts)


def read_manifest(path: Path) -> Manifest:
    """Read a manifest and verify its own hash; the other files are not checked.

    Raises:
        DataError: The manifest is missing, damaged, or from a later version of Stoker.
    """
    try:
        text = (path / MANIFEST).read_text()
        raw = json.loads(text)
    except (OSError, ValueError) as error:
        raise _damaged(path, f"{MANIFEST} cannot be read: {_reason(error)}") from None
    if not isinstance(raw, dict) or text != _sealed(_without_seal(raw)):
        raise _damaged(path, f"{MANIFEST} is not what was written")
    if raw["format"] != FORMAT:
        raise _damaged(path, f"format {raw['format']}, written by another Stoker")
    chosen = raw["best"] and Best(**raw["best"])
    manifest = Manifest(**(_without_seal(raw) | {"best": chosen}))
    if _order(path.name)[0] != manifest.step:
        raise _damaged(path, f"it is that of step {manifest.step}")
    return manifest


def _sealed(body: Mapping[str, Any]) -> str:
    # Refuse any other spelling of the same JSON, so that the hash covers every bit of the file.
    seal = _sha256(_rendered(body))
    return _rendered({**body, "sha256": seal})


def _rendered(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent=1, sort_keys=True) + "\n"


def _without_seal(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in raw.items() if key != "sha256"}


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _order(name: str) -> tuple[int, int]:
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"not a checkpoint's name: {name}")
    return int(match[1]), int(match[2] or 0)


def _free_name(folder: Path, step: int) -> Path:
    name = f"step-{step:010d}"
    repeats = [_order(path.name)[1] for path in places(folder) if _order(path.name)[0] == step]
    return folder / (f"{name}.{max(repeats) + 1}" if repeats else name)


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _hash(path: Path) -> str | None:
    try:
        return sha256_file(path)
    except OSError:
        return None


def _damaged(path: Path, why: str) -> DataError:
    return DataError(
        f"checkpoint {path} is damaged",
        got=Plain(why),
        fix=f"Delete {path.name}: training then resumes from an older one.",
    )


def _reason(error: OSError | ValueError) -> str:
    return (isinstance(error, OSError) and error.strerror) or "it is not JSON"
