"""Gets the code of a job from a commit of a git repository; files that differ from the submitted ones are an error."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from stoker.core.errors import ConfigError, DataError, Plain
from stoker.jobs.archive import EXPERIMENT, packed

SOURCE = re.compile(
    r"git\+(?P<url>(?:https|file)://[^@#\s]+)@(?P<commit>[0-9a-f]{40})(?:#subdirectory=(?P<folder>[^\s]+))?"
)
"""`git+https://HOST/REPOSITORY@COMMIT#subdirectory=FOLDER`, as in pip."""

FETCH_S = 300
"""Maximum time for the download of a commit, seconds."""


def code_of_commit(source: str, hashes: Mapping[str, str]) -> bytes:
    """Return the archive of the code, built from the files of a commit.

    Args:
        source: Repository, commit and folder, in the form of `SOURCE`.
        hashes: Name in the submitted archive -> SHA-256.

    Raises:
        ConfigError: git is not in the image, or the commit cannot be fetched.
        DataError: the commit does not contain the submitted files.
    """
    found = SOURCE.fullmatch(source)
    if found is None:
        raise ConfigError("code must name a repository and a commit", got=source)
    with tempfile.TemporaryDirectory(prefix="stoker-git-") as scratch:
        _git(scratch, "init", "--quiet")
        _git(scratch, "fetch", "--quiet", "--depth=1", found["url"], found["commit"])
        _git(scratch, "checkout", "--quiet", "FETCH_HEAD")
        folder = Path(scratch) / (found["folder"] or "")
        contents, modes = {}, {}
        for name, digest in hashes.items():
            path = folder / name.removeprefix(f"{EXPERIMENT}/")
            contents[name] = _content(path, name, digest, source)
            modes[name] = 0o755 if os.access(path, os.X_OK) else 0o644
    return packed(contents, modes)


def _content(path: Path, name: str, digest: str, source: str) -> bytes:
    content = b""
    problem = "it is not there"
    if name.startswith(f"{EXPERIMENT}/") and path.is_file():
        content, problem = path.read_bytes(), "it is another file there"
    if hashlib.sha256(content).hexdigest() != digest or not path.is_file():
        raise DataError(
            f"the commit must hold what was submitted: {name.partition('/')[2]}",
            got=Plain(f"{problem}, in {source}"),
            fix="Commit and push it, name the new commit in `code` of the target, and submit again.",
        )
    return content


def _git(folder: str, *arguments: str) -> None:
    # git must not wait for a password that no user can type
    quiet = os.environ | {"GIT_TERMINAL_PROMPT": "0"}
    try:
        subprocess.run(
            ["git", *arguments],
            cwd=folder,
            env=quiet,
            check=True,
            capture_output=True,
            text=True,
            timeout=FETCH_S,
        )
    except FileNotFoundError:
        raise ConfigError(
            "the image must have git for `code: git+...`",
            got=Plain("git is not installed"),
            fix="Add it to the image, or use `code: auto`.",
        ) from None
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        said = str(error.stderr or error).strip().splitlines()
        raise ConfigError(
            f"git {arguments[0]} must succeed in the pod",
            got=Plain(said[-1] if said else str(error)),
            fix="The pod needs access to the repository, and the commit must be pushed.",
        ) from None
