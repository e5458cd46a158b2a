"""Where files of a store are kept."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stoker.core.errors import UserError
from stoker.data.sources.config import IngestConfig
from stoker.data.sources.stores.cache_folder import cache_folder

JOB = {"STOKER_INCARNATION": "/runs/.jobs/a-1:1"}
SHARED = {"XDG_CACHE_HOME": "/shared/me"}
LOCAL = {"SLURM_TMPDIR": "/local/7", "TMPDIR": "/local/tmp"}
OWN = f"stoker-cache-{os.geteuid()}"


@pytest.mark.parametrize(
    ("environ", "folder"),
    [
        (SHARED | LOCAL, "/shared/me/stoker"),
        (SHARED | JOB, "/shared/me/stoker"),
        (SHARED | LOCAL | JOB, f"/local/7/{OWN}"),
        (SHARED | LOCAL | JOB | {"SLURM_TMPDIR": ""}, f"/local/tmp/{OWN}"),
    ],
)
def test_only_a_job_keeps_them_on_the_disk_of_its_machine(
    environ: dict[str, str], folder: str
) -> None:
    assert cache_folder(IngestConfig(source="s3://b/c"), environ) == Path(folder)
    named = IngestConfig(source="s3://b/c", cache_dir=Path("/mine"))
    assert cache_folder(named, environ) == Path("/mine")


def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("giving a folder to another user needs root")
    (tmp_path / OWN).mkdir()
    os.chown(tmp_path / OWN, 12345, 12345)
    with pytest.raises(UserError, match="a folder of user 12345"):
        cache_folder(IngestConfig(source="s3://b/c"), JOB | {"TMPDIR": str(tmp_path)})
