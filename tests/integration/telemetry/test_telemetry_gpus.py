"""GPUs are sampled through NVML's own binding; a compiled library replaces the driver."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from tests.nvml import driver_folder, environment, run_python, samples

PRELUDE = """\
import json, logging, os, time
from pathlib import Path
from tests.nvml import set_state
from stoker.telemetry.exposition import text_of
from stoker.telemetry.gpu.sampler import GpuSampler
logging.basicConfig(format="%(message)s", level="WARNING", filename=os.environ["LOG"])
STATE = Path(os.environ["NVML_STATE"])
def state(**numbers):
    set_state(STATE, **numbers)
def sampling(**settings):
    sampler = GpuSampler(**{"every_s": 0.02, "slow_s": 0.1, **settings})
    sampler.wait(10)
    return sampler
def text():
    return text_of(sampler.families())
def until(holds):
    end_s = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < end_s, text()
        time.sleep(0.005)
"""

WELL = '{gpu="0",uuid="GPU-a",mig=""}'
UNWELL = '{gpu="1",uuid="GPU-b",mig=""}'

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return driver_folder(tmp_path_factory.mktemp("driver"))


class Machine:
    """Runs scripts on a machine with a driver, or without one."""

    def __init__(self, driver: Path | None, folder: Path) -> None:
        self.log = folder / "log"
        state = folder / "state"
        state.touch()
        python_path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        self.environ = environment(driver, state, LOG=str(self.log), PYTHONPATH=python_path)

    def run(self, script: str, **more: str) -> str:
        return run_python(PRELUDE + script, self.environ | more)

    def parts(self, script: str, **more: str) -> list[dict[str, float]]:
        """Samples of each text of the list `found`."""
        printed = self.run(f"found = []\n{script}\nprint(json.dumps(found))", **more)
        return [samples(text) for text in json.loads(printed)]


@pytest.fixture
def machine(driver: Path, tmp_path: Path) -> Machine:
    return Machine(driver, tmp_path)


ONCE = """\
with sampling() as sampler:
    until(lambda: "stoker_gpu_sm_active_ratio" in text())
    found.append(text())
"""


def test_what_a_gpu_reports_becomes_metrics_in_base_units(machine: Machine) -> None:
    (found,) = machine.parts(ONCE)

    assert {name: found[f"stoker_gpu_{name}{UNWELL}"] for name in EXPECTED} == EXPECTED
    clock = 'stoker_gpu_clock_hertz{gpu="1",uuid="GPU-b",mig="",clock="sm"}'
    assert found[clock] == 1_200_000_000
    reason = 'stoker_gpu_throttled{gpu="1",uuid="GPU-b",mig="",reason='
    assert (found[f'{reason}"power limit"}}'], found[f'{reason}"heat (driver)"}}']) == (1, 0)
    ecc = 'stoker_gpu_ecc_errors_total{gpu="1",uuid="GPU-b",mig="",kind='
    assert (found[f'{ecc}"uncorrected"}}'], found[f'{ecc}"corrected"}}']) == (1, 0)
    pcie = 'stoker_gpu_pcie_bytes_per_second{gpu="1",uuid="GPU-b",mig="",direction='
    assert (found[f'{pcie}"tx"}}'], found[f'{pcie}"rx"}}']) == (100 << 20, 200 << 20)
    nvlink = 'stoker_gpu_nvlink_bytes_per_second{gpu="0",uuid="GPU-a",mig="",direction='
    assert (found[f'{nvlink}"tx"}}'], found[f'{nvlink}"rx"}}']) == (300 << 20, 400 << 20)
    info = 'stoker_gpu_info{gpu="0",uuid="GPU-a",mig="",name="NVIDIA H100 80GB HBM3",profile="",'
    assert found[f'{info}pci="00000000:01:00.0",driver="580.65.06"}}'] == 1
    (process,) = [name for name in found if name.startswith("stoker_gpu_process_memory_bytes")]
    assert process.startswith('stoker_gpu_process_memory_bytes{gpu="1",uuid="GPU-b",pid="')
    assert found[process] == 20 << 30
    assert found["stoker_exporter_last_sample_age_seconds{}"] < 5


EXPECTED = {
    "sm_active_ratio": 0.625,
    "tensor_active_ratio": 0.41,
    "dram_active_ratio": 0.3025,
    "kernel_ran_ratio": 0.93,
    "memory_used_bytes": 20 << 30,
    "memory_bytes": 80 << 30,
    "temperature_celsius": 71,
    "power_watts": 350,
    "power_limit_watts": 350,
    "xid": 0,
}


def test_a_gpu_without_gpm_has_no_activity_instead_of_zero(machine: Machine) -> None:
    (found,) = machine.parts("""\
state(gpm=0, nvlink_tx=1000)
with sampling() as sampler:
    until(lambda: "nvlink" in text())
    state(gpm=0, nvlink_tx=900000)
    until(lambda: any("direction=\\"tx\\"" in line and not line.endswith(" 0")
                      for line in text().splitlines() if "nvlink" in line))
    found.append(text())
""")

    assert not [name for name in found if "_active_ratio" in name]
    assert found[f"stoker_gpu_kernel_ran_ratio{UNWELL}"] == 0.93
    # PCIe by NVML's own measurement, NVLink by its counters.
    pcie = 'stoker_gpu_pcie_bytes_per_second{gpu="0",uuid="GPU-a",mig="",direction='
    assert (found[f'{pcie}"tx"}}'], found[f'{pcie}"rx"}}']) == (500 << 10, 700 << 10)
    nvlink = 'stoker_gpu_nvlink_bytes_per_second{gpu="0",uuid="GPU-a",mig="",direction="rx"}'
    assert found[nvlink] == 0


def test_a_counter_that_measures_nothing_is_absent(machine: Machine) -> None:
    (found,) = machine.parts("""\
state(nan=1)
with sampling() as sampler:
    until(lambda: sampler.readings()[0].activity is not None)
    found.append(text())
""")

    assert not [name for name in found if "_active_ratio" in name]
    assert f"stoker_gpu_temperature_celsius{WELL}" in found


def test_what_a_gpu_does_not_report_or_a_user_may_not_read_is_absent(machine: Machine) -> None:
    not_supported, no_permission = 3, 4
    for found in machine.parts(f"""\
for code in ({not_supported}, {no_permission}):
    state(refuse=code)
    with sampling() as sampler:
        first = sampler.readings()
        until(lambda: sampler.readings() is not first)
        found.append(text())
"""):
        assert {name.partition("{")[0] for name in found} == {
            *("stoker_exporter_last_sample_age_seconds", "stoker_gpu_info", "stoker_gpu_lost")
        }
        assert found['stoker_gpu_lost{gpu="1",uuid="GPU-b"}'] == 0
    assert not machine.log.exists() or not machine.log.read_text()


def test_a_gpu_that_falls_off_the_bus_is_a_metric_and_the_others_go_on(machine: Machine) -> None:
    lost, back = machine.parts("""\
with sampling() as sampler:
    until(lambda: "stoker_gpu_sm_active_ratio" in text())
    state(lost1=1)
    until(lambda: 'stoker_gpu_lost{gpu="1",uuid="GPU-b"} 1' in text())
    found.append(text())
    state(temperature1=44)
    until(lambda: 'stoker_gpu_lost{gpu="1",uuid="GPU-b"} 0' in text())
    found.append(text())
""")

    assert lost['stoker_gpu_lost{gpu="0",uuid="GPU-a"}'] == 0
    assert f"stoker_gpu_temperature_celsius{WELL}" in lost
    assert f"stoker_gpu_temperature_celsius{UNWELL}" not in lost
    assert back[f"stoker_gpu_temperature_celsius{UNWELL}"] == 44
    assert machine.log.read_text().splitlines() == [
        "GPU 1 (GPU-b) fell off the bus: GPU is lost",
        "GPU 1 answers again",
    ]


def test_a_gpu_that_is_lost_from_the_beginning_is_reported_by_its_number(machine: Machine) -> None:
    (found,) = machine.parts("""\
state(lost0=1)
with sampling() as sampler:
    found.append(text())
""")

    assert found['stoker_gpu_lost{gpu="0",uuid=""}'] == 1
    assert found[f"stoker_gpu_temperature_celsius{UNWELL}"] == 71


def test_xid_errors_are_reported_where_the_driver_reports_them(machine: Machine) -> None:
    with_events, without = machine.parts("""\
with sampling() as sampler:
    state(xid1=79)
    until(lambda: "stoker_gpu_xid{gpu=\\"1\\",uuid=\\"GPU-b\\",mig=\\"\\"} 79" in text())
    found.append(text())
state(events=0, xid1=79)
with sampling() as sampler:
    found.append(text())
""")

    assert with_events[f"stoker_gpu_xid{WELL}"] == 0
    assert not [name for name in without if "xid" in name]
    assert f"stoker_gpu_temperature_celsius{WELL}" in without


@pytest.mark.parametrize(
    ("code", "said"),
    [(9, "Driver Not Loaded"), (18, "RM has detected an NVML/RM version mismatch")],
)
def test_a_driver_that_does_not_answer_is_one_warning_and_absent_metrics(
    machine: Machine, code: int, said: str
) -> None:
    failed, back = machine.parts(f"""\
state(init={code})
with sampling() as sampler:
    time.sleep(0.3)  # several attempts
    found.append(text())
    state()
    until(lambda: "stoker_gpu_temperature_celsius" in text())
    found.append(text())
""")

    # A driver that should answer and does not: the age grows, which an alert sees.
    (age,) = failed.values()
    assert list(failed) == ["stoker_exporter_last_sample_age_seconds{}"]
    assert age >= 0.3
    assert back[f"stoker_gpu_temperature_celsius{UNWELL}"] == 71
    (line,) = machine.log.read_text().splitlines()
    assert line.startswith("GPUs are not sampled: ")
    assert line.endswith(". Next attempts every 0.1 s")
    assert said in line or code == 18


def test_a_driver_that_is_unloaded_and_loaded_again_is_sampled_again(machine: Machine) -> None:
    gone, back = machine.parts("""\
with sampling() as sampler:
    until(lambda: "stoker_gpu_temperature_celsius" in text())
    state(unloaded=1)
    until(lambda: "stoker_gpu_temperature_celsius" not in text())
    found.append(text())
    state()
    until(lambda: "stoker_gpu_sm_active_ratio" in text())
    found.append(text())
""")

    assert list(gone) == ["stoker_exporter_last_sample_age_seconds{}"]
    assert f"stoker_gpu_sm_active_ratio{UNWELL}" in back


def test_a_driver_that_hangs_leaves_no_old_numbers_and_no_scrape_waits(machine: Machine) -> None:
    (found,) = machine.parts("""\
with sampling() as sampler:
    until(lambda: "stoker_gpu_temperature_celsius" in text())
    state(hang=1)
    until(lambda: "stoker_gpu_temperature_celsius" not in text())
    began_s = time.monotonic()
    found.append(text())
    assert time.monotonic() - began_s < 0.5
    state()
    until(lambda: "stoker_gpu_temperature_celsius" in text())
""")

    assert list(found) == ["stoker_exporter_last_sample_age_seconds{}"]
    assert found["stoker_exporter_last_sample_age_seconds{}"] >= 0.2


def test_a_machine_without_a_gpu_has_a_sample_and_nothing_in_it(machine: Machine) -> None:
    (found,) = machine.parts("""\
state(count=0)
with sampling() as sampler:
    found.append(text())
""")

    assert list(found) == ["stoker_exporter_last_sample_age_seconds{}"]
    assert not machine.log.exists() or not machine.log.read_text()


def test_a_machine_without_a_driver_has_no_metric_and_no_warning(tmp_path: Path) -> None:
    machine = Machine(None, tmp_path)
    (found,) = machine.parts("with sampling() as sampler:\n    found.append(text())")

    if any("memory_bytes" in name for name in found):
        pytest.skip("this machine has a driver")
    assert found == {}
    assert not machine.log.read_text()


def test_mig_slices_have_memory_and_activity_of_their_own(machine: Machine) -> None:
    (found,) = machine.parts(ONCE, GPU_MIG="1")

    first = '{gpu="0",uuid="MIG-a1",mig="1"}'
    second = '{gpu="0",uuid="MIG-a2",mig="2"}'
    assert found[f"stoker_gpu_memory_bytes{first}"] == 40 << 30
    # GPM of each GPU instance.
    assert found[f"stoker_gpu_sm_active_ratio{first}"] == 0.525
    assert found[f"stoker_gpu_sm_active_ratio{second}"] == 0.425
    assert f"stoker_gpu_temperature_celsius{first}" not in found
    assert f"stoker_gpu_temperature_celsius{WELL}" in found
    assert [name for name in found if name.startswith("stoker_gpu_lost")] == [
        'stoker_gpu_lost{gpu="0",uuid="GPU-a"}',
        'stoker_gpu_lost{gpu="1",uuid="GPU-b"}',
    ]
    # A process of a slice is not counted for its GPU again.
    held = [name for name in found if name.startswith("stoker_gpu_process_memory_bytes")]
    assert sorted(name.split('"')[3] for name in held) == ["GPU-b", "MIG-a1"]
    assert any('uuid="MIG-a1",mig="1"' in name and 'profile="3g.40gb"' in name for name in found)


def test_a_training_samples_only_its_own_gpus(machine: Machine) -> None:
    (found,) = machine.parts("""\
with sampling(uuids={"GPU-b"}) as sampler:
    found.append(text())
""")

    assert f"stoker_gpu_temperature_celsius{UNWELL}" in found
    assert not [name for name in found if "GPU-a" in name]


def test_slow_fields_are_read_seldom(machine: Machine) -> None:
    printed = machine.run("""\
looked_at = []
def owner_of(pid, held):
    from stoker.telemetry.gpu.readings import GpuProcess
    looked_at.append(pid)
    return GpuProcess(pid=pid, memory_bytes=held, run="flowers/1", model="")
with sampling(slow_s=600.0, owners=owner_of) as sampler:
    first = sampler.readings()
    until(lambda: sampler.readings() is not first)
    until(lambda: sampler.age_s() is not None and len(sampler.readings()) == 2)
    time.sleep(0.2)
    assert 'run="flowers/1"' in text()
print(len(looked_at))
""")

    assert printed == "1\n"


SERVER = """\
from stoker.serve.runtime.machine import gpu_families, server_gpus
environ = server_gpus({name: os.environ[name] for name in ("CUDA_VISIBLE_DEVICES",) if name in os.environ})
os.environ |= environ | {"CUDA_VISIBLE_DEVICES": "0"}  # what a worker is given
found.append(text_of(gpu_families()))
found.append(text_of(gpu_families()))
"""


@pytest.mark.parametrize(
    ("visible", "uuids"),
    [(None, {"GPU-a", "GPU-b"}), ("1", {"GPU-b"}), ("", set())],
    ids=["all", "one", "none"],
)
def test_each_worker_of_a_server_reports_all_gpus_of_the_server(
    machine: Machine, visible: str | None, uuids: set[str]
) -> None:
    chosen = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}

    first, again = machine.parts(SERVER, **chosen)

    assert set(first) <= set(again)
    assert {uuid for uuid in ("GPU-a", "GPU-b") if any(uuid in name for name in first)} == uuids
    assert bool(first) == bool(uuids)


def test_names_of_dcgm_exporter_are_as_it_writes_them(machine: Machine) -> None:
    printed = machine.run("""\
import socket
with sampling() as sampler:
    until(lambda: "stoker_gpu_sm_active_ratio" in text())
    print(text_of(sampler.dcgm_families()).replace(socket.gethostname(), "HOST"))
""")
    stored = (ROOT / "tests" / "data" / "dcgm_exporter.txt").read_text()

    # The order of the families has no meaning; that of lines inside one has.
    assert sorted(_blocks(printed, prefix="DCGM")) == sorted(_blocks(stored, prefix="DCGM"))
    assert {name for name in samples(printed) if not name.startswith("DCGM")} == {
        "stoker_exporter_last_sample_age_seconds{}",
        'stoker_gpu_lost{gpu="0",uuid="GPU-a"}',
        'stoker_gpu_lost{gpu="1",uuid="GPU-b"}',
    }


def _blocks(text: str, *, prefix: str) -> list[str]:
    """Each metric's HELP, TYPE and samples."""
    lines = [line for line in text.splitlines() if not line.startswith("# Stored")]
    blocks = "\n".join(lines).strip().split("# HELP ")
    return [block.strip() for block in blocks if block.startswith(prefix)]


def test_dcgm_names_of_a_divided_gpu_are_those_of_its_slices(machine: Machine) -> None:
    printed = machine.run(
        """\
with sampling() as sampler:
    until(lambda: "stoker_gpu_sm_active_ratio" in text())
    print(text_of(sampler.dcgm_families()))
""",
        GPU_MIG="1",
    )
    found = samples(printed)

    of_slice = 'GPU_I_PROFILE="3g.40gb",GPU_I_ID="2"'
    (used,) = [name for name in found if "_FB_USED" in name and of_slice in name]
    assert 'gpu="0",UUID="GPU-a",pci_bus_id="00000000:01:00.0",device="nvidia2",' in used
    (tensor,) = [name for name in found if "_PIPE_TENSOR_ACTIVE" in name and of_slice in name]
    assert found[tensor] == 0.21
    (heat,) = [name for name in found if "_GPU_TEMP" in name and of_slice in name]
    assert found[heat] == 35
    # The whole is not reported next to its slices: sums over a machine would count it twice.
    assert all("GPU_I_ID" in name for name in found if 'gpu="0",UUID' in name)
