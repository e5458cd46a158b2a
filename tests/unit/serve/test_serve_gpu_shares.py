"""Workers divide GPUs and their memory; a compiled stand-in plays the driver. No GPU has seen it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.compiled import compiled

from stoker.cluster.doctor.visible import GPUS
from stoker.serve.process.gpu_shares import TOGETHER, GpuShare, gpu_shares

STAND_IN = Path(__file__).parents[2] / "integration" / "cluster" / "nvml_stand_in.c"


def test_one_worker_on_one_gpu_grows_without_a_limit() -> None:
    assert gpu_shares(["0"], workers=1, fraction=0.0) == [GpuShare(gpu="0", fraction=0.0)]


def test_workers_on_one_gpu_divide_its_memory_and_leave_some_for_their_contexts() -> None:
    shares = gpu_shares(["0"], workers=3, fraction=0.0)

    assert [share.gpu for share in shares] == ["0"] * 3
    assert sum(share.fraction for share in shares) == pytest.approx(TOGETHER)


def test_a_fraction_is_divided_among_the_workers_of_each_gpu() -> None:
    shares = gpu_shares(["GPU-a", "GPU-b"], workers=3, fraction=0.6)

    assert [share.gpu for share in shares] == ["GPU-a", "GPU-b", "GPU-a"]
    assert [share.fraction for share in shares] == pytest.approx([0.3, 0.6, 0.3])


@pytest.mark.parametrize(("fraction", "each"), [(0.5, 0.25), (0.0, TOGETHER / 2)])
def test_workers_divide_the_memory_of_a_gpu_that_has_no_name(fraction: float, each: float) -> None:
    shares = gpu_shares([], workers=2, fraction=fraction)

    assert [share.environment() for share in shares] == [{}, {}]
    assert [share.fraction for share in shares] == [each, each]
    assert gpu_shares([], workers=1, fraction=0.0) == [GpuShare(gpu=None, fraction=0.0)]


@pytest.mark.parametrize(
    ("visible", "found"),
    [
        (None, "('0', '1')"),
        ("1", "('1',)"),
        ("GPU-b, GPU-a", "('GPU-b', 'GPU-a')"),
        ("0,-1,1", "('0',)"),
        ("1,2", "('1',)"),
        ("GPU-b,GPU-c,GPU-a", "('GPU-b',)"),
        ("-1", "()"),
        ("", "()"),
    ],
)
def test_the_gpus_of_the_driver_are_used_as_far_as_the_environment_shows_them(
    driver: Path, visible: str | None, found: str
) -> None:
    assert usable(driver, {} if visible is None else {GPUS: visible}) == found


@pytest.mark.parametrize(
    ("visible", "found"),
    [
        (None, "('MIG-a1', 'MIG-a2', 'GPU-b')"),
        ("MIG-a2,1", "('MIG-a2', '1')"),
        ("MIG-a2,MIG-a3", "('MIG-a2',)"),
    ],
)
def test_slices_of_a_divided_gpu_are_handed_out_one_each(
    driver: Path, visible: str | None, found: str
) -> None:
    environment = {} if visible is None else {GPUS: visible}

    assert usable(driver, environment | {"GPU_MIG": "1"}) == found


def test_a_broken_driver_means_no_gpu(driver: Path) -> None:
    assert usable(driver, {GPUS: "0", "NO_DRIVER": "1"}) == "()"


CREW = """\
import sys, time
from pathlib import Path
from stoker.serve.config import ServeConfig
from stoker.serve.process.workers import WorkerPool
folder = Path(sys.argv[1])
say = "import os, pathlib, sys; number = sys.argv[sys.argv.index('--worker') + 1]; "
say += "gpus = [os.environ[name] for name in ('CUDA_VISIBLE_DEVICES', 'STOKER_SERVER_GPUS')]; "
say += "text = ' '.join([*gpus, *sys.argv[-2:]]); "
say += f"pathlib.Path({str(folder)!r}, number + '.txt').write_text(text); sys.stdin.read()"
config = ServeConfig(root=folder, workers=3, per_process_gpu_memory_fraction=0.5)
crew = WorkerPool(config, [sys.executable, "-c", say], folder)
until_s = time.monotonic() + 30
while len([path for path in folder.glob('*.txt') if path.read_text()]) < 3 and time.monotonic() < until_s:
    time.sleep(0.02)
crew.end()
"""


def test_each_worker_is_started_with_its_gpu_and_its_part_of_the_memory(
    driver: Path, tmp_path: Path
) -> None:
    inherited = {name: value for name, value in os.environ.items() if name != GPUS}
    subprocess.run(
        [sys.executable, "-c", CREW, str(tmp_path)],
        env=inherited | {"LD_LIBRARY_PATH": str(driver)},
        check=True,
        timeout=60,
    )

    said = [(tmp_path / f"{number}.txt").read_text() for number in range(3)]
    flag = "--per_process_gpu_memory_fraction"
    assert said == [f"0 all {flag} 0.25", f"1 all {flag} 0.5", f"0 all {flag} 0.25"]


STUCK = """\
import os, signal, sys, time
from pathlib import Path
from stoker.serve.process import workers
from stoker.serve.config import ServeConfig
folder = Path(sys.argv[1])
say = "import os, pathlib, signal, sys; number = sys.argv[sys.argv.index('--worker') + 1]; "
say += f"folder = pathlib.Path({str(folder)!r}); first = not (folder / '0.stuck-on-gpu').exists(); "
say += "stays = number == '0' and first; "
say += "stays and signal.signal(signal.SIGTERM, signal.SIG_IGN); "
say += "stays and (folder / '0.stuck-on-gpu').touch(); "
say += "(folder / f'{number}.json').write_text(str(os.getpid())); sys.stdin.read()"
workers._GRACE_S = 4.0
config = ServeConfig(root=folder, workers=2, lame_duck_s=0.0, drain_s=1)
crew = workers.WorkerPool(config, [sys.executable, "-c", say], folder)
until_s = time.monotonic() + 20
def pid_of(number):
    file = folder / f"{number}.json"
    while not (file.is_file() and file.read_text()):
        assert time.monotonic() < until_s, "a worker does not start"
        time.sleep(0.02)
    return int(file.read_text())
stuck, other = pid_of(0), pid_of(1)
begun_s = time.monotonic()
crew.look()
print("look", time.monotonic() - begun_s)
os.kill(other, signal.SIGKILL)
while (folder / "1.json").is_file() and pid_of(1) == other:
    assert time.monotonic() < until_s, "a dead worker is not replaced"
    crew.look()
    time.sleep(0.02)
print("replaced", time.monotonic() - begun_s)
os.kill(stuck, 0)
assert not (folder / "2.json").exists(), "two share the memory of a GPU"
crew.end()
print("ended", time.monotonic() - begun_s)
"""


def test_while_a_stuck_worker_of_a_gpu_ends_the_others_are_looked_at_and_its_time_counts_once(
    tmp_path: Path,
) -> None:
    """Also without NVML: the worker itself says that it is on a GPU."""
    done = subprocess.run(
        [sys.executable, "-c", STUCK, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    took_s = {name: float(text) for name, text in map(str.split, done.stdout.splitlines())}
    assert took_s["look"] < 2.0
    assert took_s["replaced"] < 5.0
    assert 5.0 <= took_s["ended"] < 8.0, "the 5 s were given once, from the first look on"


def usable(driver: Path, environment: dict[str, str]) -> str:
    code = "import os; from stoker.serve.process.gpu_shares import usable_gpus; print(usable_gpus(os.environ))"
    inherited = {name: value for name, value in os.environ.items() if name != GPUS}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=inherited | {"LD_LIBRARY_PATH": str(driver)} | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a libnvidia-ml.so.1 that has two GPUs."""
    folder = tmp_path_factory.mktemp("driver")
    compiled(STAND_IN, folder / "libnvidia-ml.so.1")
    return folder
