"""The GPU suite with the CPU in the GPU's place: it runs, part by part and test by test, and measures nothing."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
RUN = ROOT / "benchmarks" / "gpu" / "run.py"
COMMITTED = ROOT / "benchmarks" / "results" / "gpu.json"

SOME = {"train", "fit"}
OTHERS = {
    *("ingest", "serve", "start", "transformer", "transformer_fit"),
    *("small", "xla_fit", "xla", "precision"),
}
"""With `SOME`, all but `tune`, which takes a minute: tests/integration/app/test_app_tune.py runs it."""


def suite(*arguments: str, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, str(RUN), *arguments], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == code, done.stdout[-6000:] + done.stderr[-6000:]
    return done.stdout + done.stderr


def hash_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else ""


@pytest.mark.slow
@pytest.mark.parametrize(
    "parts",
    [pytest.param(SOME, id="some"), pytest.param(OTHERS, id="others", marks=pytest.mark.soak)],
)
def test_every_part_runs_small_on_the_cpu_and_no_result_is_committed(
    tmp_path: Path, parts: set[str]
) -> None:
    before = hash_of(COMMITTED)

    suite("smoke", "--only", ",".join(parts), "--out", str(tmp_path), "--work", str(tmp_path))

    found = json.loads((tmp_path / "gpu-cpu.json").read_text())["parts"]
    assert set(found) == parts
    for name, record in found.items():
        assert record["device"] == "cpu, stand-in", name
        assert record["figures"], name
        assert [f["name"] for f in record["figures"] if f["value"] is None] == [], name
    assert hash_of(COMMITTED) == before


@pytest.mark.soak
def test_the_gpu_tests_pass_on_the_cpu(tmp_path: Path) -> None:
    said = suite(
        "test", "--quick", "--device", "cpu", "--out", str(tmp_path), "--work", str(tmp_path)
    )

    assert said.startswith("passed")
    log = (tmp_path / "logs" / "test_gpu.log").read_text()
    assert "failed" not in log
    assert (tmp_path / "logs.tar.gz").stat().st_size > 0


def test_without_a_gpu_the_suite_says_so(tmp_path: Path) -> None:
    if Path("/dev/nvidiactl").exists():
        pytest.skip("a GPU is here")

    for command in ("test", "bench"):
        said = suite(command, "--out", str(tmp_path), code=1)

        assert "a GPU must be there. Received: none" in said
        assert "DEVICE=cpu" in said
    assert os.listdir(tmp_path) == []


def test_a_part_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    said = suite(
        "bench", "--device", "cpu", "--only", "train,trian", "--out", str(tmp_path), code=1
    )

    assert "ONLY must name some of train, fit, " in said
    assert "Received: trian." in said


def test_code_is_imported_from_the_checkout_and_not_from_a_folder_that_all_users_can_write() -> (
    None
):
    spec = importlib.util.spec_from_file_location("gpu_suite", RUN)
    assert spec is not None
    assert spec.loader is not None
    run = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(run)

    for command in (["test"], ["bench"], ["smoke"], ["part", "train"]):
        given = run.arguments().parse_args(command)
        assert given.work.is_relative_to(ROOT)
        assert given.out.is_relative_to(ROOT)
