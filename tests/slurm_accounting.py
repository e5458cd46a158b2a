"""Slurm's accounting on this machine: Debian's MariaDB and slurmdbd, in the folder of a test's cluster."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

PROGRAMS = ("mariadbd", "mariadb-install-db", "slurmdbd")

IN_SLURM_CONF = """
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={port}
AccountingStoragePass={folder}/munge.socket
AccountingStorageTRES=gres/gpu,gres/gpu:fake
AccountingStoreFlags=job_comment
"""

IN_SLURMDBD_CONF = """
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort={port}
SlurmUser=root
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={database}
StorageUser=root
LogFile={folder}/slurmdbd.log
PidFile={folder}/slurmdbd.pid
"""

SMALL = ("--innodb-log-file-size=5M", "--innodb-flush-method=nosync", "--skip-name-resolve")
"""Of the database: 23 MB on the disk instead of 114."""


def missing(path: str) -> list[str]:
    """Programs of the accounting that are not on a PATH."""
    return [name for name in PROGRAMS if not shutil.which(name, path=path)]


def require_accounting(path: str, outcome: Path) -> None:
    """Skip the test where the accounting is not installed; in CI, fail where it should be.

    Args:
        path: PATH of the daemons.
        outcome: What `make test` has written about the installation.
    """
    lacks = missing(path)
    if not lacks:
        return
    why = outcome.read_text().strip() if outcome.is_file() else "`make test` installs it"
    if os.environ.get("CI") == "true" and why == "installed":
        pytest.fail(f"`make test` installed the accounting, but {', '.join(lacks)} is not there")
    pytest.skip(f"no {', '.join(lacks)}: {why}")


def _tmpdir(folder: Path) -> str:
    """Return the option that gives a database its own temporary folder.

    A MariaDB that starts removes every `#sql...` in its temporary folder. In /tmp it removes what the database of
    another test process is at work with.
    """
    return f"--tmpdir={folder}/database-tmp"


def make_database(folder: Path, environ: dict[str, str]) -> None:
    """Make the files of an empty database, in 2 s."""
    (folder / "database-tmp").mkdir()
    where = ("--no-defaults", f"--datadir={folder}/database", "--user=root", _tmpdir(folder))
    login = ("--auth-root-authentication-method=normal", "--skip-test-db")
    done = subprocess.run(
        ["mariadb-install-db", *where, *login, *SMALL],
        env=environ,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def database_command(folder: Path, port: int) -> list[str]:
    """Return the program and arguments of the database."""
    return [
        *("mariadbd", "--no-defaults", f"--datadir={folder}/database", "--user=root", *SMALL),
        _tmpdir(folder),
        *("--bind-address=127.0.0.1", f"--port={port}", f"--socket={folder}/database.socket"),
        f"--pid-file={folder}/database.pid",
    ]


def write_accounting(folder: Path, *, port: int, database: int) -> None:
    """Write slurmdbd.conf, and add the accounting to slurm.conf.

    Args:
        folder: Of the cluster.
        port: Of slurmdbd.
        database: Port of the database.
    """
    conf = folder / "slurmdbd.conf"
    conf.write_text(IN_SLURMDBD_CONF.format(folder=folder, port=port, database=database))
    conf.chmod(0o600)  # slurmdbd takes no other
    with (folder / "slurm.conf").open("a") as stream:
        stream.write(IN_SLURM_CONF.format(folder=folder, port=port))
