"""The Makefile: calls of pytest, the parts of `make soak`, and the installation of chromium."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("arguments", "exit_codes", "passes"),
    [
        ("", (0, 0, 5), True),
        ("", (5, 0, 5), False),
        ("", (0, 5, 5), False),
        ("tests/gpu", (5, 5, 0), True),
        ('-k "alone or first"', (5, 0, 5), True),
        ("-k 'alone or first'", (0, 5, 5), True),
        ("-x", (1, 0, 5), False),
        ("-x", (0, 2, 5), False),
    ],
)
def test_a_call_without_a_test_fails_only_where_none_was_named(
    arguments: str, exit_codes: tuple[int, int, int], passes: bool, tmp_path: Path
) -> None:
    """The exit codes are those of make's three calls of pytest, in their order."""
    names = ("stamp", "tfjs", "triton", "envoy", "chromium", "prom", "grafana", "slurm")
    stamps = [tmp_path / name for name in names]
    for stamp in stamps:
        # Of what is "installed", make asks no package index.
        stamp.write_text("0 cpu\n" if stamp == stamps[0] else "installed\n")
    calls = tmp_path / "calls"
    calls.write_text("".join(f"{code}\n" for code in exit_codes))
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/sh\n[ "$2" = pytest ] || exit 0\n'
        f"code=$(head -n 1 '{calls}')\nsed -i 1d '{calls}'\nexit $code\n"
    )
    python.chmod(0o755)

    done = subprocess.run(
        [
            *("make", "--directory", str(ROOT), "test", f"ARGS={arguments}", f"BIN={tmp_path}"),
            *(f"STAMP={stamps[0]}", f"TFJS_STAMP={stamps[1]}", f"TRITON_STAMP={stamps[2]}"),
            *(f"ENVOY_STAMP={stamps[3]}", f"CHROMIUM_STAMP={stamps[4]}"),
            *(f"PROMETHEUS_STAMP={stamps[5]}", f"GRAFANA_STAMP={stamps[6]}"),
            f"SLURM_STAMP={stamps[7]}",
            *(f"UV={sys.executable}", f"PYTHON={sys.executable}", "OTHER="),
        ],
        env={name: value for name, value in os.environ.items() if not name.startswith("MAKE")},
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.returncode == 0) is passes, done.stderr
    if passes:
        assert calls.read_text() == ""


def make(target: str, binaries: Path, *settings: str) -> subprocess.CompletedProcess[str]:
    """Run a target with the programs of another folder in the place of `.venv/bin`."""
    stamp = binaries / "stamp"
    stamp.write_text("0 cpu\n")
    variables = (f"BIN={binaries}", f"STAMP={stamp}", f"PYTHON={sys.executable}", "OTHER=")
    return subprocess.run(
        ["make", "--directory", str(ROOT), target, *variables, *settings],
        env={name: value for name, value in os.environ.items() if not name.startswith("MAKE")},
        capture_output=True,
        text=True,
        check=False,
    )


def program(path: Path, body: str) -> None:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def test_soak_runs_its_three_parts_and_each_runs_alone(tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    # Not the question of which Python it is, which every make asks.
    program(tmp_path / "python", f'[ "$1" = -c ] || echo "$*" >> \'{calls}\'')

    parts = {}
    for part in ("soak-train", "soak-serve", "soak-jobs"):
        assert make(part, tmp_path).returncode == 0
        parts[part] = calls.read_text().splitlines()
        calls.unlink()
    assert make("soak", tmp_path).returncode == 0

    assert all(parts.values())
    assert calls.read_text().splitlines() == [line for part in parts.values() for line in part]
    for part, word in (("train", "random_instants"), ("serve", "swaps"), ("jobs", "-m soak")):
        assert any(word in line for line in parts[f"soak-{part}"])


def test_a_part_of_soak_is_stopped_at_its_limit(tmp_path: Path) -> None:
    assert re.search(r"^SOAK_LIMIT := 60m$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    program(tmp_path / "python", '[ "$1" = -c ] || exec sleep 60')

    done = make("soak-serve", tmp_path, "SOAK_LIMIT=1s")

    assert done.returncode == 2
    assert "soak-serve: stopped after 1s" in done.stdout


@pytest.mark.parametrize(
    ("programs", "outcome"),
    [
        ({"chromium": ""}, "installed"),
        ({}, "no apt-get here"),
        ({"apt-get": "", "id": "echo 1000"}, "installing it needs root: apt-get install chromium"),
        ({"apt-get": "", "id": "echo 0", "apt-cache": ""}, "apt has no package chromium"),
        (
            {"apt-get": "exit 100", "id": "echo 0", "apt-cache": "echo '  Candidate: 1.0'"},
            "apt-get install chromium failed",
        ),
        (
            {"apt-get": "exit 0", "id": "echo 0", "apt-cache": "echo '  Candidate: 1.0'"},
            "installed",
        ),
    ],
)
@pytest.mark.parametrize("script", ["install_chromium", "install_slurm"])
def test_a_package_is_installed_where_it_may_be_and_its_absence_has_a_reason(
    tmp_path: Path, programs: dict[str, str], outcome: str, script: str
) -> None:
    if script == "install_slurm":
        programs = {name.replace("chromium", "slurmctld"): body for name, body in programs.items()}
        others = ("munged", "slurmdbd", "mariadbd")
        programs |= dict.fromkeys(others, "") if "slurmctld" in programs else {}
        packages = "slurm-wlm munge slurmdbd mariadb-server"
        outcome = outcome.replace("install chromium", f"install {packages}")
        outcome = outcome.replace("chromium", "slurm-wlm")
    binaries = tmp_path / "bin"
    binaries.mkdir()
    for name in ("sh", "mkdir", "dirname", "timeout", "grep"):
        (binaries / name).symlink_to(str(shutil.which(name)))
    for name, body in programs.items():
        program(binaries / name, body)
    stamp = tmp_path / "tools" / "outcome"

    done = subprocess.run(
        [ROOT / ".ci" / script, stamp],
        env={"PATH": str(binaries)},
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0, done.stderr
    assert stamp.read_text() == f"{outcome}\n"
    assert (f" ({outcome})" in done.stdout) is (outcome != "installed")


@pytest.mark.parametrize(
    ("programs", "outcome"),
    [
        ({"prometheus": "", "prometheus-alertmanager": ""}, "installed"),
        ({"prometheus": "", "alertmanager": ""}, "installed"),
        ({}, "no apt-get here"),
        ({"apt-get": "", "apt-cache": ""}, "apt has no package prometheus"),
        (
            {"prometheus": "", "apt-get": "", "apt-cache": ""},
            "apt has no package prometheus-alertmanager",
        ),
        (
            {"apt-get": "exit 100", "apt-cache": "echo '  Candidate: 1.0'"},
            "apt-get download prometheus failed",
        ),
        (
            {
                "apt-get": 'echo package > "$3"_1.deb',
                "apt-cache": "echo '  Candidate: 1.0'",
                "dpkg-deb": 'read -r text < "$2" && echo "$text" > "$3/unpacked"',
                "rm": ":",
            },
            "installed",
        ),
    ],
)
def test_prometheus_is_unpacked_where_it_can_be_had_and_its_absence_has_a_reason(
    tmp_path: Path, programs: dict[str, str], outcome: str
) -> None:
    binaries = tmp_path / "bin"
    binaries.mkdir()
    for name in ("sh", "mkdir", "dirname", "timeout", "grep"):
        (binaries / name).symlink_to(str(shutil.which(name)))
    for name, body in programs.items():
        program(binaries / name, body)

    done = subprocess.run(
        [ROOT / ".ci" / "get_prometheus", "tools/prometheus.txt", "tools/prometheus"],
        cwd=tmp_path,
        env={"PATH": str(binaries)},
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0, done.stderr
    assert (tmp_path / "tools" / "prometheus.txt").read_text() == f"{outcome}\n"
    assert (tmp_path / "tools" / "prometheus" / "unpacked").is_file() is ("rm" in programs)


@pytest.mark.parametrize(
    ("programs", "outcome"),
    [
        ({}, "no npm here"),
        ({"npm": "exit 1"}, "npm ci failed"),
        ({"npm": '[ "$1" = ci ] && read -r text < package-lock.json'}, "installed"),
    ],
)
def test_the_schema_of_grafana_is_installed_where_there_is_npm(
    tmp_path: Path, programs: dict[str, str], outcome: str
) -> None:
    binaries = tmp_path / "bin"
    binaries.mkdir()
    for name in ("sh", "mkdir", "dirname", "timeout", "cp"):
        (binaries / name).symlink_to(str(shutil.which(name)))
    for name, body in programs.items():
        program(binaries / name, body)

    done = subprocess.run(
        [ROOT / ".ci" / "get_grafana_schema", tmp_path / "grafana.txt", tmp_path / "grafana"],
        env={"PATH": str(binaries)},
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0, done.stderr
    assert (tmp_path / "grafana.txt").read_text() == f"{outcome}\n"
    assert (f"without Grafana's schema ({outcome})" in done.stdout) is (outcome != "installed")
