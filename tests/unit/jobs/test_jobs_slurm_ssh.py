"""What goes between this machine and a login node: files, logs through their rotation, and what ssh complains about."""

from __future__ import annotations

import os
import random
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stoker.app.task.job_log import TaskLog
from stoker.core.config import build
from stoker.core.errors import ConfigError, UserError
from stoker.jobs.job import Job, read_job
from stoker.jobs.logs import GrowingLog
from stoker.jobs.providers.slurm.machine import LOGIN, Call
from stoker.jobs.providers.slurm.remote.mirror import FETCH, apply, known_logs
from stoker.jobs.providers.slurm.remote.problems import ssh_problem
from stoker.jobs.providers.slurm.remote.ssh import _program
from stoker.jobs.providers.slurm.remote.transfer import SEND, described, packed, twin
from stoker.jobs.providers.slurm.settings import SlurmTarget

VIA = {"via": "ssh:me@login", "remote_folder": "/scratch/me", "python": "/envs/bin/python"}


def bash(script: str, *words: str, content: bytes = b"") -> bytes:
    """Run a script as a login node does: on standard input, with what it reads after it."""
    text = f"set -- {shlex.join(words)}\n{script}".encode()
    return subprocess.run(
        ["bash", "-s"], input=text + content, capture_output=True, check=True
    ).stdout


def fetch(there: Path, here: Path) -> None:
    apply(bash(FETCH, str(there), *known_logs(here)), here)


@pytest.mark.parametrize("seed", range(2))
def test_logs_are_followed_through_their_rotation_and_no_line_is_lost_or_repeated(
    tmp_path: Path, seed: int
) -> None:
    """Two workers begin with the same line, and each fetch comes at another moment."""
    chance = random.Random(seed)
    there, here = tmp_path / "there", tmp_path / "here"
    logs = [TaskLog(there / "logs" / f"task-{rank}.log", file_bytes=2000) for rank in (0, 1)]
    followed = [GrowingLog(here / "logs", f"task-{rank}.log") for rank in (0, 1)]
    written: list[list[str]] = [[], []]
    read: list[list[str]] = [[], []]
    for number in range(200):
        for rank in (0, 1):
            line = "start 1 on n1" if number == 0 else f"{number} {'x' * chance.randrange(80)}"
            logs[rank].write(line)
            written[rank].append(line)
        if chance.random() < 0.1:
            fetch(there, here)
            for rank in (0, 1):
                read[rank] += [line.partition(" ")[2] for line in followed[rank].lines()]
    fetch(there, here)
    for rank in (0, 1):
        read[rank] += [line.partition(" ")[2] for line in followed[rank].lines()]

    assert read == written
    for path in (there / "logs").iterdir():
        assert (here / "logs" / path.name).read_bytes() == path.read_bytes()


def test_facts_of_a_job_are_those_of_the_cluster(tmp_path: Path) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    (there / "incarnations" / "1.tasks").mkdir(parents=True)
    for name in ("incarnations/1", "incarnations/2", "stop", "other"):
        (there / name).touch()
    fetch(there, here)
    (there / "stop").unlink()
    (there / "outcome").write_text("0 done\n")
    fetch(there, here)

    assert (here / "outcome").read_text() == "0 done\n"
    assert not (here / "stop").exists()
    assert sorted(path.name for path in here.iterdir()) == ["incarnations", "outcome"]
    assert sorted(path.name for path in (here / "incarnations").iterdir()) == ["1", "2"]
    fetch(tmp_path / "nowhere", here)


@pytest.mark.parametrize(
    "answer", [b"logs/task-0.log - 0 9\nabc", b"Welcome\n", b"outcome - x 1\na", b"\xff\n"]
)
def test_an_answer_that_is_cut_or_none_is_one_line(tmp_path: Path, answer: bytes) -> None:
    with pytest.raises(UserError, match="complete files of the job"):
        apply(answer, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_leads_out_of_the_folder_is_not_written(tmp_path: Path) -> None:
    apply(b"../evil - 0 1\nxlogs/../../evil.log - 0 1\nx", tmp_path / "here")

    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_files_are_sent_whole_and_others_are_removed(tmp_path: Path) -> None:
    jobs = tmp_path / "a b'$x"
    place = jobs / "job-1"
    place.mkdir(parents=True)
    (place / "outcome").touch()
    (place / "job.sbatch").write_text("old")
    files = {"job.sbatch": b"new\n\x00", "code.tar.gz": bytes(range(256)) * 1000}

    tar = packed({f"job-1/{name}": content for name, content in files.items()})
    bash(SEND, str(jobs), "outcome", "stop", content=tar)
    assert {path.name: path.read_bytes() for path in place.iterdir() if path.is_file()} == files
    with pytest.raises(subprocess.CalledProcessError):
        bash(SEND, str(jobs), "job.sbatch", content=tar[:-200_000])
    assert {path.name for path in place.iterdir()} == {*files, "logs"}
    assert [path.name for path in jobs.iterdir()] == ["job-1"]


def test_a_job_has_other_paths_on_the_cluster_and_another_id(job: Job, tmp_path: Path) -> None:
    there = twin(job, tmp_path / "far")
    there.place.mkdir(parents=True)
    (there.place / "job.json").write_bytes(described(there))

    assert read_job(there.place) == there
    assert there.folder == tmp_path / "far" / "small"
    assert there.runs == there.folder / "runs"
    assert there.id != job.id
    assert replace(there, folder=job.folder, runs=job.runs) == job


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (
            "ssh: Could not resolve hostname login: Name unknown",
            "must be reachable. Received: ssh:",
        ),
        ("me@login: Permission denied (publickey).", "must let you in without a question"),
        (
            "@@@\n@ REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.",
            "-R HOST",
        ),
        ("Host key verification failed.", "Connect once by hand"),
        ("", "Received: no connection"),
    ],
)
def test_what_ssh_complains_about_is_one_line(said: str, words: str) -> None:
    line = str(ssh_problem("login", said))

    assert words in line
    assert "\n" not in line


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (VIA | {"via": "login"}, "via must be ssh:LOGIN"),
        (VIA | {"via": "ssh:-oProxyCommand=x"}, "via must be ssh:LOGIN"),
        (VIA | {"via": "ssh:a b"}, "via must be ssh:LOGIN"),
        (VIA | {"remote_folder": "scratch"}, "remote_folder must be an absolute path"),
        ({"remote_folder": "/scratch"}, "via must be ssh:LOGIN"),
        (VIA | {"python": None}, "python, container or environment_from: lock must be"),
    ],
)
def test_settings_of_ssh_that_cannot_work_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build(SlurmTarget, settings)


@pytest.mark.parametrize("value", ["a'b\"$(exit 3)`\\\n\tx", "\udcff\u00e9", ""])
def test_a_job_gets_its_secrets_and_the_variables_of_a_login_only(
    value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN", value)
    monkeypatch.setenv("CHANCE", "1")
    called = tmp_path / "env"
    called.write_text('#!/bin/sh\nprintf "%s\\n" "$*" >> "$HOME/called"\nexec /usr/bin/env "$@"\n')
    called.chmod(0o755)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    call = Call(argv=("env", "-0"), for_job=True, secrets=("TOKEN", "OTHER"), answer_s=60.0)

    out = bash("", content=os.fsencode(_program(call)))

    found = dict(os.fsdecode(each).split("=", 1) for each in out.split(b"\0") if each)
    assert found["TOKEN"] == value
    assert set(found) - {"PWD", "SHLVL", "_"} <= {*LOGIN, "TOKEN"}
    assert "TOKEN" not in (tmp_path / "called").read_text()
