"""The model repository, in TensorFlow Serving's layout. A version is either complete or does not exist.

root/<model>/<version>/           a SavedModel and `stoker.manifest.json`
root/<model>/aliases.json         alias -> version
root/<model>/.version.*.tmp       a push that is in progress or was killed
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any

from stoker.core.errors import ConfigError, DataError, Plain, UserError
from stoker.core.files import (
    alone,
    full_disk_is_named,
    hash_folder,
    list_files,
    publish_folder,
    read_json,
    scratch_folder,
    sweep,
    write_json,
)
from stoker.core.fingerprint import fingerprint

MANIFEST = "stoker.manifest.json"
"""File of a version with the hashes of its other files; written last."""

ALIASES = "aliases.json"
"""File next to the versions: alias -> version."""

WARM_UP_FILE = "assets.extra/tf_serving_warmup_requests"
"""File of a version with warm-up requests; it may be added after the push."""

MAX_VERSION = 2**63 - 1
"""Largest version number: TensorFlow Serving stores it as a signed 64-bit integer."""

_STORE = re.compile(r"(gs|gcs|s3|s3a|az|abfss?|wasbs?|oss|obs|hdfs|https?):")
_FORMAT = 1
_LOCK = ".push.lock"
_NAME_CHARS = 128
"""Maximum length of a model or alias name, bytes: with our suffix, a folder name has at most 255 bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pushed:
    """Result of a push."""

    version: int
    """The version that holds the pushed content: the new version, or the newest one if its content was equal."""

    path: Path
    """Folder of the version."""

    already: bool
    """Whether the newest version already had this content."""


class Repository:
    """A folder of models with their versions and aliases."""

    def __init__(self, root: Path) -> None:
        """Open a repository.

        Args:
            root: Folder of all models; it need not exist yet.

        Raises:
            UserError: `root` is an address of object storage.
        """
        check_is_folder(root)
        self.root = root

    def models(self) -> list[str]:
        """Return the sorted names of all models that have at least one version."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            folders = [entry for entry in os.scandir(self.root) if is_model_name(entry.name)]
            return sorted(entry.name for entry in folders if version_folders(Path(entry.path)))
        return []

    def versions(self, model: str) -> list[int]:
        """Return the numbers of a model's versions, in ascending order; empty for an unknown model."""
        return sorted(version_folders(self.base(model)))

    def newest(self, model: str) -> int | None:
        """Return a model's highest version; None if the model has no version."""
        return max(version_folders(self.base(model)), default=None)

    def base(self, model: str) -> Path:
        """Return the folder of a model's versions: TensorFlow Serving's `model_base_path`."""
        return self.root / checked_name(model)

    def path(self, model: str, version: int) -> Path:
        """Return the folder of a version.

        Raises:
            UserError: the version does not exist.
        """
        folders = version_folders(self.base(model))
        if version not in folders:
            raise UserError(
                f"{model!r} must have a version {version} in {self.root}",
                got=Plain(f"versions {', '.join(map(str, sorted(folders))) or 'none'}"),
                fix="Push the version first.",
            )
        return folders[version]

    def content_hash(self, model: str, version: int) -> str:
        """Return a SHA-256 over all current files of a version except the manifest.

        Warm-up requests that were added after the push are left out, because the model is the same.
        """
        return _content(_without_added_warm_up(self.path(model, version)))

    def aliases(self, model: str) -> dict[str, int]:
        """Return alias -> version."""
        return read_aliases(self.base(model))

    def set_alias(self, model: str, alias: str, *, version: int) -> None:
        """Make an alias point to a version, atomically; the alias is created if it does not exist yet.

        Raises:
            UserError: the version does not exist.
        """
        self.path(model, version)
        with _exclusive(self.base(model)):
            _write_alias(self.base(model), alias, version)

    def push(
        self,
        saved_model: Path,
        model: str,
        *,
        alias: str = "champion",
        lineage: Mapping[str, Any] | None = None,
    ) -> Pushed:
        """Copy a SavedModel into the repository as the next version; readers never see an incomplete version.

        Args:
            saved_model: The folder that holds `saved_model.pb`.
            model: The model's name.
            alias: An alias that will name this version.
            lineage: The origin of the version: any JSON value.

        Raises:
            ConfigError: the model's name or the alias is not a valid folder name.
            UserError: the SavedModel is missing, or the disk is full; the repository is unchanged.
            DataError: the SavedModel holds links, or changed while it was copied.
        """
        base, source = self.base(model), _savedmodel_hashes(saved_model)
        checked_name(alias)
        base.mkdir(parents=True, exist_ok=True)
        with _exclusive(base):
            # Remove files of killed pushes. No push is running, because this process holds the lock.
            sweep(base, "*")
            newest = self.newest(model)
            if newest is not None and self.content_hash(model, newest) == _content(source):
                _write_alias(base, alias, newest)
                return Pushed(version=newest, path=self.path(model, newest), already=True)
            version = _publish(saved_model, source, base=base, lineage=lineage or {})
            _write_alias(base, alias, version)
        return Pushed(version=version, path=base / str(version), already=False)

    def add(self, source: Path, model: str, *, version: int) -> Pushed:
        """Copy a version of another repository, under its number. A repeated call changes nothing.

        Args:
            source: The version's folder.
            model: The model's name.
            version: Number of the version, in both repositories.

        Raises:
            DataError: the version is damaged, or this repository has other content under its number.
        """
        verify(source)
        base = self.base(model)
        base.mkdir(parents=True, exist_ok=True)
        with _exclusive(base):
            sweep(base, "*")
            if version in version_folders(base):
                if self.content_hash(model, version) != _content(_without_added_warm_up(source)):
                    raise DataError(
                        f"{self.path(model, version)} must be the same model as {source}",
                        got=Plain("other content under the same number"),
                        fix="Push the model under another number.",
                    )
                return Pushed(version=version, path=self.path(model, version), already=True)
            with scratch_folder(base / str(version)) as scratch:
                _copy(source, scratch)
                if (source / MANIFEST).is_file():
                    shutil.copyfile(source / MANIFEST, scratch / MANIFEST)
                verify(scratch)
                publish_folder(scratch, base / str(version))
        return Pushed(version=version, path=base / str(version), already=False)


def check_is_folder(path: Path) -> None:
    """Refuse an address of object storage, which would otherwise be used as the name of a folder.

    Raises:
        UserError: the path is an address of object storage.
    """
    # `Path` turns the two slashes of an address into one.
    store = next((part for part in path.parts if _STORE.fullmatch(part)), None)
    if store is not None:
        raise UserError(
            "A model repository must be a folder on a local disk or on NFS, not object storage",
            got=Plain(str(path).replace(f"{store}/", f"{store}//", 1)),
            fix="Copy the versions to a folder, or mount a file system with hard links.",
        )


def is_model_name(name: str) -> bool:
    """Return whether a name is valid for a model: one plain folder name that is not hidden."""
    plain = name.isprintable() and not set(name) & set('/\\:"')
    return plain and 0 < len(name.encode()) <= _NAME_CHARS and not name.startswith((".", " "))


def checked_name(name: str, *, what: str = "a model's name and an alias") -> str:
    """Return the name if it is valid.

    Args:
        name: Name of a model, or an alias.
        what: Subject of the error message.

    Raises:
        ConfigError: the name could lead out of the repository, or name a hidden folder.
    """
    if not is_model_name(name):
        raise ConfigError(
            f"{what} must be one plain folder name, without path separators, colons, quotes or a "
            "leading dot",
            got=name,
            fix="Choose letters, digits, - and _.",
        )
    return name


def version_folders(base: Path) -> dict[int, Path]:
    """Return version -> folder, for the folders in `base` whose name is a number; leading zeros are allowed."""
    try:
        entries = sorted(os.scandir(base), key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    named = [(entry, entry.name) for entry in entries if _is_version(entry.name)]
    return {int(name): Path(entry.path) for entry, name in named if entry.is_dir()}


def read_aliases(base: Path) -> dict[str, int]:
    """Return alias -> version of the model whose versions are in `base`.

    Raises:
        DataError: the file is damaged.
    """
    path = base / ALIASES
    if not path.is_file():
        return {}
    found = read_json(path)
    if not isinstance(found, dict) or not all(type(v) is int for v in found.values()):
        raise DataError(f"{path} must map aliases to versions", got=found, fix="Push again.")
    return {str(alias): version for alias, version in found.items()}


def verify(folder: Path) -> bool:
    """Check every file of a version against its manifest.

    Returns:
        Whether the version has a manifest; without a manifest, nothing is checked.

    Raises:
        DataError: a file is damaged, missing, or was added after the push (except `WARM_UP_FILE`,
            which is not part of the model); the error names it.
    """
    path = folder / MANIFEST
    if not path.is_file():
        return False
    manifest = read_json(path)
    if not isinstance(manifest, dict) or manifest.pop("sha256", None) != fingerprint(manifest):
        raise _damaged(path, "bytes that differ from the written ones")
    if manifest.get("format") != _FORMAT:
        raise _damaged(path, f"format {manifest.get('format')!r}, known is {_FORMAT}")
    _compare(folder, manifest["files"], _without_added_warm_up(folder))
    return True


def _compare(folder: Path, expected: Mapping[str, str], found: Mapping[str, str]) -> None:
    for name in sorted(expected.keys() | found.keys()):
        if name not in found:
            raise _damaged(folder / name, "no such file")
        if name not in expected:
            raise _damaged(folder / name, "a file that is not in its manifest")
        if expected[name] != found[name]:
            raise _damaged(folder / name, "bytes that differ from the pushed ones")


def _damaged(path: Path, got: str) -> DataError:
    return DataError(
        f"{path} must be as it was pushed", got=Plain(got), fix="Push the model again."
    )


def _is_version(name: str) -> bool:
    return name.isascii() and name.isdigit() and int(name) <= MAX_VERSION


def _hashed(folder: Path) -> dict[str, str]:
    """Return name -> hash of every file except the manifest.

    Raises:
        DataError: a file is a link or a device.
    """
    for path in folder.rglob("*"):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise DataError(
                f"{path} must be a plain file",
                got=Plain("a link or a device"),
                fix="Replace it with a copy of its content.",
            )
    return {name: digest for name, digest in hash_folder(folder).items() if name != MANIFEST}


def _without_added_warm_up(folder: Path) -> dict[str, str]:
    """Return name -> hash as `_hashed` does, without a warm-up file that is not in the manifest."""
    found = _hashed(folder)
    if WARM_UP_FILE not in found:
        return found
    with contextlib.suppress(DataError):  # no manifest, or a damaged one, which `verify` reports
        manifest = read_json(folder / MANIFEST)
        if isinstance(manifest, dict) and WARM_UP_FILE not in manifest.get("files", ()):
            del found[WARM_UP_FILE]
    return found


def _content(hashes: Mapping[str, str]) -> str:
    return fingerprint(dict(hashes))


def _savedmodel_hashes(saved_model: Path) -> dict[str, str]:
    if not any((saved_model / name).is_file() for name in ("saved_model.pb", "saved_model.pbtxt")):
        raise UserError(
            f"{saved_model} must be a SavedModel",
            got=Plain("no saved_model.pb in it"),
            fix="Run `stoker export` first.",
        )
    return _hashed(saved_model)


def _publish(
    saved_model: Path, source: Mapping[str, str], *, base: Path, lineage: Mapping[str, Any]
) -> int:
    """Copy the files, check the copy, write its manifest, and rename the copy to the next free version."""
    with scratch_folder(base / "version") as scratch:
        _copy(saved_model, scratch)
        if _hashed(scratch) != source:
            raise DataError(
                f"{saved_model} must not change while it is pushed",
                got=Plain("a copy with other bytes"),
                fix="Push the SavedModel again when no program writes to it.",
            )
        write_json(scratch / MANIFEST, _manifest(source, lineage))
        while True:
            used = [int(name) for name in os.listdir(base) if _is_version(name)]  # noqa: PTH208 - names suffice
            version = max(used, default=0) + 1
            try:
                publish_folder(scratch, base / str(version))
            except FileExistsError:
                continue  # a program that does not use our lock took this number first
            return version


def _copy(source: Path, target: Path) -> None:
    for path in list_files(source):
        relative = PurePosixPath(path.relative_to(source).as_posix())
        if str(relative) == MANIFEST:
            continue
        (target / relative).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target / relative)
    for folder in source.rglob("*"):
        if folder.is_dir():  # keep empty folders, such as `assets` of a SavedModel without assets
            (target / folder.relative_to(source)).mkdir(parents=True, exist_ok=True)


def _manifest(files: Mapping[str, str], lineage: Mapping[str, Any]) -> dict[str, Any]:
    manifest = {
        "format": _FORMAT,
        "pushed_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "files": dict(files),
        "lineage": dict(lineage),
    }
    return {**manifest, "sha256": fingerprint(manifest)}


def _write_alias(base: Path, alias: str, version: int) -> None:
    aliases = read_aliases(base)
    if aliases.get(checked_name(alias)) != version:
        write_json(base / ALIASES, {**aliases, alias: version})


@contextlib.contextmanager
def _exclusive(base: Path) -> Iterator[None]:
    """Allow one push at a time to a model's folder; if a push is killed, the kernel releases its lock."""
    with full_disk_is_named(base), alone(base / _LOCK):
        yield
