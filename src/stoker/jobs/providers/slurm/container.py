"""The container in which a job's workers run: its settings, and the commands that start it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from stoker.core.errors import ConfigError

_MOUNT = re.compile(r"(/[^:,]*)(?::(/[^:,]*))?(?::(ro|rw))?")
_SEPARATORS = re.compile(r"[:,\s]")


@dataclass(frozen=True, kw_only=True, slots=True)
class Container:
    """An image with Stoker, and the folders mounted in it."""

    image: str
    """Image in the notation of the runtime: a file, or e.g. `docker://registry/image:tag` (apptainer) or
    `registry#image:tag` (pyxis)."""

    runtime: Literal["pyxis", "apptainer"]
    """`pyxis`: the plugin that adds the option `--container-image` to srun. `apptainer`: the program `apptainer
    exec`."""

    mounts: tuple[str, ...] = ()
    """Folders to mount, each `/FROM`, `/FROM:/TO` or `/FROM:/TO:ro`, in addition to the folders of the experiment and
    its runs."""

    def __post_init__(self) -> None:
        if not self.image or self.image.startswith("-") or not self.image.isprintable():
            raise ConfigError(
                "container.image must be the name or the path of an image", got=self.image
            )
        for mount in self.mounts:
            if not _MOUNT.fullmatch(mount) or not mount.isprintable():
                raise ConfigError(
                    "container.mounts must be absolute paths, /FROM:/TO",
                    got=mount,
                    fix="E.g. /data:/data:ro.",
                )

    def options(self, folders: Sequence[Path], *, gpus: bool) -> list[str]:
        """Return the words that start a command in the container: srun's options, or a program and its options.

        Args:
            folders: More folders to mount, at the same path in the container.
            gpus: Whether the workers have GPUs.

        Raises:
            ConfigError: a folder's name has a character that separates entries in a list of mounts.
        """
        mounts = ",".join([*map(_same_path, _outermost(folders)), *map(_whole, self.mounts)])
        if self.runtime == "pyxis":
            return [f"--container-image={self.image}", f"--container-mounts={mounts}"]
        return ["apptainer", "exec", *(["--nv"] if gpus else []), "--bind", mounts, self.image]


def _outermost(folders: Sequence[Path]) -> list[Path]:
    """Return the folders that are not inside another one of the folders."""
    return [
        each
        for each in dict.fromkeys(folders)
        if not any(each != other and each.is_relative_to(other) for other in folders)
    ]


def _same_path(folder: Path) -> str:
    if _SEPARATORS.search(str(folder)):
        raise ConfigError(
            "a folder that is mounted in a container must have no spaces, commas or colons in its name",
            got=str(folder),
            fix="Choose another folder of runs: --set runs=DIR.",
        )
    return f"{folder}:{folder}"


def _whole(mount: str) -> str:
    """Return a mount with both paths: `/a` becomes `/a:/a`."""
    found = _MOUNT.fullmatch(mount)
    source, target, mode = found.groups() if found else (mount, None, None)
    return ":".join(filter(None, (source, target or source, mode)))
