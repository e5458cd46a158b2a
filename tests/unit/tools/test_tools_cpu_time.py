"""The CPU time of each folder of tests, in the summary of pytest, and its limit."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
CONFTEST = """
from tests.cpu_time import CpuTime

def pytest_configure(config):
    config.pluginmanager.register(CpuTime(config), "cpu-time")
"""
TESTS = """
import subprocess, sys, time

BURN = "import time\\nwhile time.process_time() < {0}: pass"

def test_of_its_own_process():
    end = time.process_time() + {0}
    while time.process_time() < end:
        pass

def test_of_a_child():
    subprocess.run([sys.executable, "-c", BURN], check=True)
"""

SHARED = """
import subprocess, sys
import pytest

BURNS = '''
import sys, time
for seconds in sys.stdin:
    end = time.process_time() + float(seconds)
    while time.process_time() < end: pass
    print(flush=True)
'''

@pytest.fixture(scope="session")
def burn():
    command = [sys.executable, "-c", BURNS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        def burn(seconds):
            child.stdin.write(f"{seconds}\\n")
            child.stdin.flush()
            child.stdout.readline()
        yield burn
        child.stdin.close()
"""


def run(
    folder: Path, *flags: str, budget: str = "", fixtures: str = ""
) -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text(fixtures + CONFTEST)
    for name, seconds in (("quick", 0.02), ("slow", 0.6)):
        (folder / "checks" / name).mkdir(parents=True, exist_ok=True)
        tests = folder / "checks" / name / f"test_{name}.py"
        tests.write_text(TESTS.format(seconds))
    (folder / "pyproject.toml").write_text(
        f"[tool.pytest.ini_options]\n[tool.stoker.test_minutes]\n{budget}\n"
    )
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--import-mode=importlib"]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    return subprocess.run(
        [*command, "-o", f"pythonpath={ROOT}", *flags],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )


def minutes(output: str) -> dict[str, float]:
    return {
        name: float(value)
        for value, name in re.findall(r"^ +([\d.]+)  (.+)$", output, re.MULTILINE)
    }


@pytest.mark.parametrize("flags", [(), ("-n", "2")])
def test_tests_and_their_children_count_for_their_folder(
    tmp_path: Path, flags: tuple[str, ...]
) -> None:
    done = run(tmp_path, *flags, budget='"checks/slow" = 1')

    assert done.returncode == 0, done.stdout + done.stderr
    assert "FAILED" not in done.stdout
    found = minutes(done.stdout)
    assert next(iter(found)) in ("checks/slow", "(imports and collection)")
    assert found["checks/slow"] * 60 + 0.3 >= 1.2
    assert found["checks/quick"] < found["checks/slow"]
    assert found["total"] == pytest.approx(sum(found.values()) - found["total"], abs=0.03)


@pytest.mark.parametrize("flags", [(), ("-n", "2")])
def test_a_folder_over_its_limit_fails_the_run(tmp_path: Path, flags: tuple[str, ...]) -> None:
    over = run(tmp_path, *flags, budget='"checks/slow" = 0.004')

    assert over.returncode == 1, over.stdout
    assert "FAILED checks/slow: " in over.stdout
    assert "at most 0.01, 2.5 for each minute of its budget" in over.stdout


def test_the_child_of_a_session_counts_for_the_folder_that_uses_it(tmp_path: Path) -> None:
    for name, seconds in (("first", 1.2), ("second", 0.0)):
        (tmp_path / "checks" / name).mkdir(parents=True)
        test = f"def test_{name}(burn):\n    burn({seconds})\n"
        (tmp_path / "checks" / name / f"test_{name}.py").write_text(test)

    done = run(tmp_path, "checks/first", "checks/second", fixtures=SHARED)

    found = minutes(done.stdout)
    assert found["checks/first"] * 60 + 0.3 >= 1.2
    assert found["checks/second"] < found["checks/first"]
