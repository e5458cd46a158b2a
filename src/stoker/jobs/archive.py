"""The experiment's code as an archive file: packed at the submission, unpacked once per machine.

code.tar.gz
  files.json         name -> SHA-256 of every file below
  experiment/        the experiment's folder
  packages/          the user's own modules outside that folder, for `PYTHONPATH`
"""

from __future__ import annotations

import fnmatch
import gzip
import hashlib
import io
import json
import os
import tarfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from stoker.core.errors import ConfigError, DataError, Plain, UserError
from stoker.core.files import alone, remove, scratch_folder, sha256_file, writable
from stoker.core.folder_files import IGNORE_FILE, Ignored, walk
from stoker.jobs.local_packages import local_packages

CODE = "code.tar.gz"
"""Name of the archive in a job's folder."""

HASHES, EXPERIMENT, PACKAGES = "files.json", "experiment", "packages"

LIMIT_BYTES = 64 << 20
"""Maximum size of all files together, bytes, before compression."""

LARGEST = 3
"""Number of the largest files that an error names."""

_SETTINGS = ("stoker.yaml", "stoker.lock.yaml", IGNORE_FILE)
"""Files of the experiment's folder that are packed, although a run does not treat them as code."""

_OTHER = "Name another folder for temporary files: TMPDIR"

_LEFT_OUT = (
    ".*",  # hidden files, among them `.env` and `.git`
    *("*.env", "*.pem", "*.key", "*.p12", "*.pfx", "*.jks", "*.ppk", "*.keytab"),
    *("id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", "kubeconfig*"),
    *("credentials*", "secrets.y*ml", "secrets.json", "secrets.toml", "service[-_]account*.json"),
    *("venv", "node_modules", "*.egg-info", "wandb", "mlruns"),
)
"""Patterns of names that are not packed: secrets, Python environments, and files that other programs write."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Archive:
    """A packed experiment."""

    content: bytes
    """The bytes of the archive file; the same code gives the same bytes on every machine."""

    sizes: dict[str, int]
    """Name in the archive -> size, bytes."""

    @property
    def digest(self) -> str:
        """SHA-256 of the content, hexadecimal."""
        return hashlib.sha256(self.content).hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class Code:
    """An unpacked archive."""

    experiment: Path
    """The unpacked folder of the experiment."""

    packages: Path
    """Folder of the user's other modules, for `PYTHONPATH`; it may be missing."""


def pack(
    folder: Path, *, outside: Collection[Path] = (), limit_bytes: int = LIMIT_BYTES
) -> Archive:
    """Pack an experiment's code: every file that is not excluded.

    Hidden files, secrets, caches, logs and the files that `.stokerignore` names are excluded. Also excluded are links
    to files outside the folder or to excluded files, unless the name of the link ends in `.py`.

    Args:
        folder: The experiment's folder.
        outside: Folders, files and patterns of data, runs and models, which are excluded.
        limit_bytes: Maximum size of all files together, bytes.

    Raises:
        ConfigError: the files exceed the limit; the message names the largest files.
        UserError: a file cannot be read.
    """
    folder, outside = folder.resolve(), [each.resolve() for each in outside]
    files = {f"{EXPERIMENT}/{name}": path for name, path in _files(folder, outside)}
    files |= {
        f"{EXPERIMENT}/{name}": folder / name for name in _SETTINGS if (folder / name).is_file()
    }
    sources = [path for path in files.values() if path.suffix == ".py"]
    for name, place in local_packages(folder, sources).items():
        if place.is_file():
            files[f"{PACKAGES}/{place.name}"] = place
            continue
        inside = _files(place, (*outside, folder))
        files |= {f"{PACKAGES}/{name}/{each}": path for each, path in inside}
    _require_small({name: path.stat().st_size for name, path in files.items()}, limit_bytes)
    try:
        contents = {name: path.read_bytes() for name, path in files.items()}
    except OSError as error:
        raise UserError(
            f"{error.filename} must be a file that can be read",
            got=Plain(error.strerror or str(error)),
            fix=f"Make it readable, or name it in {IGNORE_FILE}.",
        ) from None
    modes = {name: 0o755 if os.access(path, os.X_OK) else 0o644 for name, path in files.items()}
    sizes = {name: len(content) for name, content in contents.items()}
    return Archive(content=packed(contents, modes), sizes=sizes)


def unpack(archive: Path, digest: str, *, into: Path) -> Code:
    """Unpack an archive into a folder named by its digest, unless a complete copy exists.

    Processes that unpack at the same time create only one copy. A copy that has lost files, e.g. because a program
    cleaned `/tmp`, is replaced.

    Args:
        archive: The file.
        digest: Its SHA-256, from the job's description.
        into: Folder of all copies on this machine; only its owner may write there.

    Raises:
        DataError: the archive has another digest, is damaged, or has a name or a link that leads out of the folder.
        UserError: the folder belongs to another user, or the disk is full.
    """
    final = into / digest
    with writable(into, what="the folder of unpacked code", fix=f"{_OTHER}."):
        into.mkdir(mode=0o700, parents=True, exist_ok=True)
        if into.stat().st_uid != os.geteuid():
            raise UserError(
                f"{into} must belong to the user whose job it is",
                got=Plain(f"it belongs to user {into.stat().st_uid}"),
                fix=f"{_OTHER}.",
            )
        with alone(into / f".{digest}.lock"):
            if not _is_whole(final):
                _make(archive, digest, final)
    return Code(experiment=final / EXPERIMENT, packages=final / PACKAGES)


def _files(folder: Path, outside: Collection[Path]) -> Iterator[tuple[str, Path]]:
    """Yield the relative name and the path of each file to pack."""
    is_ignored = Ignored(folder, also=_LEFT_OUT)
    excluded = [each for each in outside if each != folder]
    for place in walk(folder, is_ignored=is_ignored, outputs=outside):
        if place.left_out:
            raise ConfigError(
                f"{folder / place.name} has too many files for an archive of code",
                fix=f"If it is data, name it in {folder / IGNORE_FILE}.",
            )
        for entry in place.files:
            path = Path(entry.path)
            if not path.is_file() or _is_among(path, excluded):
                continue
            if path.is_symlink() and path.suffix != ".py":
                target = path.resolve()
                inside = target.is_relative_to(folder) and not is_ignored(target)
                if not inside or _is_among(target, excluded):
                    continue
            yield path.relative_to(folder).as_posix(), path


def _is_among(path: Path, excluded: Collection[Path]) -> bool:
    """Whether a file is one of these files, in one of these folders, or matches one of these patterns."""
    return any(
        path.is_relative_to(each) or fnmatch.fnmatchcase(str(path), str(each)) for each in excluded
    )


def _require_small(sizes: dict[str, int], limit_bytes: int) -> None:
    total = sum(sizes.values())
    if total <= limit_bytes:
        return
    largest = sorted(sizes, key=lambda name: sizes[name], reverse=True)[:LARGEST]
    named = ", ".join(f"{name.partition('/')[2]} ({_mib(sizes[name])})" for name in largest)
    raise ConfigError(
        f"the code of a job must have at most {_mib(limit_bytes)}",
        got=Plain(f"{_mib(total)}; the largest files: {named}"),
        fix=f"If they are not code, name them in {IGNORE_FILE}.",
    )


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"


def read_hashes(content: bytes) -> dict[str, str]:
    """Return name -> SHA-256 of the files in an archive, from its `files.json`."""
    with tarfile.open(fileobj=io.BytesIO(content), mode="r:gz") as tar:
        listed: Any = tar.extractfile(HASHES)
        return dict(json.load(listed))


def packed(contents: dict[str, bytes], modes: dict[str, int]) -> bytes:
    """Return an archive of files: the same files give the same bytes.

    Args:
        contents: Name in the archive -> bytes.
        modes: Name -> file mode; the default is 0o644.
    """
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    first = {HASHES: json.dumps(hashes, sort_keys=True, indent=0).encode()}
    buffer = io.BytesIO()
    with (
        gzip.GzipFile(filename="", mode="wb", fileobj=buffer, mtime=0) as stream,
        tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for name in (HASHES, *sorted(contents, key=os.fsencode)):
            content = first.get(name) or contents.get(name, b"")
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(content), modes.get(name, 0o644)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def _is_whole(copy: Path) -> bool:
    try:
        hashes: dict[str, str] = json.loads((copy / HASHES).read_bytes())
        return all(sha256_file(copy / name) == digest for name, digest in hashes.items())
    except (OSError, ValueError):
        return False


def _make(archive: Path, digest: str, final: Path) -> None:
    content = _read_archive(archive)
    if (found := hashlib.sha256(content).hexdigest()) != digest:
        raise _damaged(archive, f"its SHA-256 is {found[:12]}..., not {digest[:12]}...")
    with scratch_folder(final) as scratch:
        try:
            with tarfile.open(fileobj=io.BytesIO(content), mode="r:gz") as tar:
                for member in tar:
                    _write(tar, member, scratch, archive)
        except (tarfile.TarError, EOFError, gzip.BadGzipFile) as error:
            raise _damaged(archive, str(error)) from None
        if not _is_whole(scratch):
            raise _damaged(archive, "its files do not have the hashes that it lists")
        with scratch_folder(final) as old:
            if final.exists():
                # Rename the old copy instead of deleting it in place: a process that runs there keeps its files until
                # it ends.
                os.rename(final, old / "damaged")
            os.rename(scratch, final)
    remove(old)


def _write(tar: tarfile.TarFile, member: tarfile.TarInfo, scratch: Path, archive: Path) -> None:
    parts = PurePosixPath(member.name).parts
    is_known = member.name == HASHES or (len(parts) > 1 and parts[0] in (EXPERIMENT, PACKAGES))
    if not member.isreg() or not is_known or ".." in parts:
        raise _damaged(archive, f"{member.name!r} is not a file inside the archive's own folders")
    target = scratch.joinpath(*parts)
    stream: Any = tar.extractfile(member)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("xb") as made:
            made.write(stream.read())
    except (FileExistsError, NotADirectoryError):
        raise _damaged(archive, f"{member.name!r} occurs twice") from None
    target.chmod(0o755 if member.mode & 0o100 else 0o644)


def _read_archive(archive: Path) -> bytes:
    try:
        return archive.read_bytes()
    except OSError as error:
        raise _damaged(archive, error.strerror or str(error)) from None


def _damaged(archive: Path, why: str) -> DataError:
    return DataError(
        f"{archive} must be the code that was submitted",
        got=Plain(why),
        fix="Submit the experiment again.",
    )
