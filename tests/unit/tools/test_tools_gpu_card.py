"""What refuses a figure: a stand-in for NVIDIA's driver has a healthy card and one that is slowed and shared.

No GPU was there to see it on.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.compiled import compiled

ROOT = Path(__file__).resolve().parents[3]

LOOK = """\
import json, sys, time
from dataclasses import asdict
sys.path.insert(0, sys.argv[1])
from card import watched
with watched("mark") as watch:
    time.sleep(0.7)
print(json.dumps({"card": watch.card, "during": watch.during(), "refused": watch.refusals}))
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("driver")
    source = ROOT / "tests" / "integration" / "cluster" / "nvml_stand_in.c"
    compiled(source, folder / "libnvidia-ml.so.1")
    return folder


def look(driver: Path, *, card: str, **more: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", LOOK, str(ROOT / "benchmarks" / "gpu")],
        env=os.environ | {"LD_LIBRARY_PATH": str(driver), "CUDA_VISIBLE_DEVICES": card} | more,
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_healthy_card_refuses_nothing_and_is_recorded(driver: Path) -> None:
    found = look(driver, card="0")

    assert found["refused"] == []
    card = found["card"]
    assert (card["name"], card["driver"]) == ("NVIDIA H100 80GB HBM3", "580.65.06")
    assert (card["power_limit_w"], card["clock_most_mhz"]) == (350.0, 1980)
    assert found["during"]["looks"] >= 2
    assert found["during"]["slowed"] == {}


def test_a_slowed_and_shared_card_refuses_and_says_why(driver: Path) -> None:
    found = look(driver, card="1")

    busy, shared, slowed = found["refused"]
    assert busy == "93% busy before the part began"
    assert shared.startswith("shared with other processes: python")
    assert slowed.startswith("slowed by power limit in 100% of ")


def test_a_power_cap_at_the_cards_own_limit_is_recorded_and_does_not_refuse() -> None:
    from card import Watch, refusals_of

    from stoker.cluster.doctor.gpus import GpuState

    state = GpuState(
        index=0, name="a", uuid="u", compute_capability=(9, 0), memory_bytes=2, used_bytes=1,
        pci="", slowed_by=("power limit",),
    )  # fmt: skip
    limits = {"power_limit_w": 700.0, "power_limit_default_w": 700.0}
    watch = Watch(before=None, card=limits, looks=[state] * 10)

    assert watch.during()["slowed"] == {"power limit": 1.0}
    assert refusals_of(watch) == []
    watch.card["power_limit_w"] = 500.0
    assert refusals_of(watch) == ["slowed by power limit in 100% of 10 looks"]
    watch.card["power_limit_w"] = 700.0
    hot = GpuState(
        index=0, name="a", uuid="u", compute_capability=(9, 0), memory_bytes=2, used_bytes=1,
        pci="", slowed_by=("heat (hardware)",),
    )  # fmt: skip
    watch.looks = [state] * 15 + [hot]
    assert refusals_of(watch) == ["slowed by heat (hardware) in 6% of 16 looks"]


NAME_CARD = """\
import sys
from pathlib import Path
root, folder = map(Path, sys.argv[1:])
sys.path[:0] = [str(root / "benchmarks" / name) for name in ("gpu", "train", "images")]
from situation import Situation
at = Situation(part="a", device="gpu", results=folder / "a.json", work=folder, limit_s=1.0)
print(at.card_name())
"""


@pytest.mark.parametrize(
    ("visible", "name"),
    [("1,0", "NVIDIA L4"), ("0", "NVIDIA H100 80GB HBM3"), ("MIG-a2", "MIG 3g.40gb"), ("-1", "")],
)
def test_a_figure_names_the_card_that_tensorflow_takes(
    visible: str, name: str, driver: Path, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", NAME_CARD, str(ROOT), str(tmp_path)],
        env=os.environ
        | {"LD_LIBRARY_PATH": str(driver), "CUDA_VISIBLE_DEVICES": visible}
        | {"GPU_1_NAME": "NVIDIA L4", "GPU_MIG": "1"},
        capture_output=True,
        text=True,
        check=True,
    )

    assert done.stdout.strip().removeprefix("NVIDIA H100 80GB HBM3 ") == name


LOOK_AT_OTHERS = """\
import os, sys
sys.path.insert(0, sys.argv[1])
import card
if os.getuid() == 0:
    os.setuid(65534)
print(card._is_ours(int(sys.argv[2]), "mark"), card._is_ours(2**22 + 1, "mark"))
"""


def test_another_users_process_is_not_ours_and_one_that_has_ended_is() -> None:
    another = os.getpid() if os.getuid() == 0 else 1
    if os.getuid() and Path("/proc/1").stat().st_uid == os.getuid():
        pytest.skip("every process here is of this user")

    done = subprocess.run(
        [sys.executable, "-c", LOOK_AT_OTHERS, str(ROOT / "benchmarks" / "gpu"), str(another)],
        capture_output=True,
        text=True,
        check=True,
    )

    assert done.stdout == "False True\n"


def test_without_a_driver_there_is_no_card(driver: Path) -> None:
    found = look(driver, card="0", NO_DRIVER="1")

    assert found == {"card": {}, "during": {}, "refused": []}
