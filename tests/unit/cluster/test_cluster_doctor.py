"""What is wrong with a machine follows from what it says of itself; each finding can be acted on."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tests.compiled import compiled

from stoker.cluster.doctor.examine import Machine, examine
from stoker.cluster.doctor.framework import (
    Framework,
    Package,
    code_for,
    missing_libraries,
    probe_framework,
    unfit_libraries,
)
from stoker.cluster.doctor.gpus import GpuProcess, Gpus, GpuState, Link, LinkKind, best_groups
from stoker.cluster.doctor.host import Disk, Host, read_host
from stoker.cluster.limits import memory_limit
from stoker.core.errors import Finding

GIB = 1 << 30

HOST = Host(
    cores=16,
    memory_bytes=128 * GIB,
    available_bytes=100 * GIB,
    limit_bytes=None,
    shm_bytes=64 * GIB,
    shm_free_bytes=64 * GIB,
    open_files=65536,
    open_files_most=65536,
    processes=500_000,
    address_space_bytes=-1,
    locked_bytes=8 << 20,
    infiniband=(),
    container=None,
    numa_nodes=1,
    nvidia_on_bus=2,
    nvidia_module="580.65.06",
    nvidia_nodes=("nvidia0", "nvidia1"),
    disk=Disk(folder="/data", free_bytes=500 * GIB, write_bytes_per_s=2e9, read_bytes_per_s=3e9),
)

GPU = GpuState(
    index=0,
    name="NVIDIA H100",
    uuid="GPU-0",
    compute_capability=(9, 0),
    memory_bytes=80 * GIB,
    used_bytes=0,
    pci="00000000:01:00.0",
    persistence=True,
    ecc=True,
    ecc_uncorrected=0,
    pcie_width=16,
    pcie_most_width=16,
    mig=False,
)

GPUS = Gpus(driver="580.65.06", cuda=(13, 0), states=(GPU, replace(GPU, index=1)))

FRAMEWORK = Framework(
    version="2.21.0",
    is_cuda=True,
    cuda="12.5.1",
    cudnn="9",
    capabilities=("sm_60", "sm_70", "sm_80", "sm_89", "compute_90"),
    gpus=("/physical_device:GPU:0", "/physical_device:GPU:1"),
)

CUDNN = Package(name="nvidia-cudnn-cu12", wanted=">=9.3", installed="9.5", fits=True)

NCCL = Package(name="nvidia-nccl-cu12", wanted=">=2.25", installed=None, fits=False)

WELL = Machine(host=HOST, gpus=GPUS, framework=FRAMEWORK, packages=(CUDNN,))

NO_GPU = Machine(
    host=replace(HOST, nvidia_on_bus=0, nvidia_module=None, nvidia_nodes=()),
    gpus=Gpus(unread="NVML Shared Library Not Found"),
    framework=replace(FRAMEWORK, gpus=()),
    packages=(replace(CUDNN, installed=None, fits=False),),
)


def only(machine: Machine) -> Finding:
    (finding,) = examine(machine)
    assert finding.fix.endswith(".") or ": " in finding.fix, "a sentence, or a command behind one"
    return finding


@pytest.mark.parametrize("machine", [WELL, NO_GPU], ids=["two GPUs", "none"])
def test_a_machine_that_is_well_is_left_alone(machine: Machine) -> None:
    assert examine(machine) == []


def gpu(**state: object) -> Machine:
    changed = replace(GPU, **state)  # type: ignore[arg-type]  # names and types are the tests'
    return replace(WELL, gpus=replace(GPUS, states=(changed, replace(GPU, index=1))))


def host(**facts: object) -> Machine:
    return replace(NO_GPU, host=replace(NO_GPU.host, **facts))  # type: ignore[arg-type]  # names and types are the tests'


def unseen(machine: Machine = WELL, **framework: object) -> Machine:
    changed = replace(FRAMEWORK, **({"gpus": ()} | framework))  # type: ignore[arg-type]  # names and types are the tests'
    return replace(machine, framework=changed)


FOUND = {
    "tensorflow_start": (
        unseen(NO_GPU, version=None, error="exit code 1: no module"),
        "error: TensorFlow does not start: exit code 1: no module",
    ),
    "driver_missing": (
        host(nvidia_on_bus=1),
        "error: 1 NVIDIA GPU on the PCI bus, but no driver is loaded",
    ),
    "driver_broken": (
        host(nvidia_on_bus=1, nvidia_module="570.1"),
        (
            "error: NVIDIA's driver does not answer (NVML Shared Library Not Found), though the kernel "
            "has its module 570.1"
        ),
    ),
    "container_gpus": (
        host(nvidia_on_bus=1, nvidia_module="570.1", container="docker"),
        "error: the machine has NVIDIA's driver 570.1, and this container none of its GPUs",
    ),
    "driver_old": (
        replace(WELL, gpus=replace(GPUS, driver="470.1")),
        (
            "error: TensorFlow 2.21.0 is built for CUDA 12.5.1, which needs a driver of 525.60.13 or "
            "newer; here is 470.1"
        ),
    ),
    "cuda_version": (
        replace(WELL, packages=(replace(CUDNN, installed="8.9", fits=False),)),
        "error: nvidia-cudnn-cu12 is 8.9, and TensorFlow 2.21.0 needs >=9.3",
    ),
    "library_version": (
        unseen(gpus=FRAMEWORK.gpus, cudnn="9.3", libraries=(("CUDA", "12.2"), ("cuDNN", "9.1.0"))),
        "error: the cuDNN that is found is 9.1.0, and TensorFlow 2.21.0 was built for 9.3 or a later 9",
    ),
    "nccl_missing": (
        replace(WELL, packages=(CUDNN, NCCL)),
        (
            "warning: TensorFlow sees 2 GPUs and NCCL is missing: gradients cannot be exchanged "
            "between them by it"
        ),
    ),
    "tensorflow_cpu": (
        unseen(is_cuda=False),
        (
            "error: the driver has 2 GPUs and TensorFlow sees none: this TensorFlow is built without "
            "CUDA"
        ),
    ),
    "gpus_hidden": (
        replace(unseen(gpus=("/physical_device:GPU:0",)), visible="1"),
        "warning: the driver has 2 GPUs and TensorFlow sees 1: CUDA_VISIBLE_DEVICES is '1'",
    ),
    "library_missing": (
        unseen(missing=("libcudnn.so.9",)),
        "error: the driver has 2 GPUs and TensorFlow sees none: it did not find libcudnn.so.9",
    ),
    "gpus_unseen": (
        unseen(),
        "error: the driver has 2 GPUs and TensorFlow sees none; TensorFlow's log gives the reason",
    ),
    "gpu_code": (
        gpu(compute_capability=(3, 7)),
        (
            "error: this TensorFlow does not run on GPU 0 (NVIDIA H100, compute capability 3.7): it has "
            "code for sm_60, sm_70, sm_80, sm_89, compute_90"
        ),
    ),
    "gpu_new": (
        gpu(compute_capability=(12, 0)),
        (
            "warning: this TensorFlow has no machine code for GPU 0 (NVIDIA H100, compute capability "
            "12.0): the driver compiles it from PTX at the first start, which can take many minutes"
        ),
    ),
    "ecc": (
        gpu(ecc_uncorrected=3),
        (
            "error: GPU 0 (NVIDIA H100) has had 3 memory errors that could not be corrected: what it "
            "computes may be wrong"
        ),
    ),
    "ecc_off": (
        gpu(ecc=False, ecc_uncorrected=None, ecc_default=True),
        (
            "warning: GPU 0 (NVIDIA H100) has its correction of memory errors switched off: a flipped "
            "bit is computed with, unnoticed"
        ),
    ),
    "persistence": (
        gpu(persistence=False),
        (
            "warning: GPU 0 (NVIDIA H100) is powered down when no process uses it: the first use takes "
            "some seconds longer"
        ),
    ),
    "throttled": (
        gpu(slowed_by=("power limit",), clock_mhz=900, clock_most_mhz=1980, temperature_c=60),
        (
            "warning: GPU 0 (NVIDIA H100) runs slower than it could because of power limit (900 of 1980 "
            "MHz, 60 °C)"
        ),
    ),
    "pcie_width": (
        gpu(pcie_width=4),
        "warning: GPU 0 (NVIDIA H100) uses 4 of 16 PCIe lanes: input reaches it at 25% of the speed",
    ),
    "gpu_in_use": (
        gpu(
            used_bytes=20 * GIB,
            processes=(GpuProcess(pid=7, name="python", memory_bytes=20 * GIB),),
        ),
        "warning: GPU 0 (NVIDIA H100) is used by python (7), with 20.0 of 80 GiB taken",
    ),
    "memory": (host(available_bytes=GIB), "warning: 1.0 GiB of 128.0 GiB memory are free"),
    "memory_limit": (
        host(limit_bytes=8 * GIB),
        "warning: this process may use 8.0 GiB of the machine's 128.0 GiB",
    ),
    "shm": (
        host(shm_bytes=64 << 20, shm_free_bytes=64 << 20, container="docker"),
        "warning: /dev/shm has 0.1 GiB, 0.1 GiB free: exchange between processes fails or is slow",
    ),
    "open_files": (
        host(open_files=1024),
        "warning: a process started from this shell may open at most 1024 files",
    ),
    "address_space": (
        host(address_space_bytes=8 * GIB),
        (
            "warning: a process started from this shell may map at most 8.0 GiB of address space: "
            "TensorFlow and CUDA map far more than they use, and fail to start"
        ),
    ),
    "processes": (
        host(processes=1024),
        "warning: your user may have at most 1024 processes and threads, on 16 cores",
    ),
    "locked_memory": (
        host(infiniband=("mlx5_0", "mlx5_1")),
        (
            "warning: a process may lock at most 0.0 GiB of memory: NCCL cannot exchange data over mlx5_0, mlx5_1"
        ),
    ),
    "disk_space": (
        host(disk=replace(HOST.disk, free_bytes=GIB)),
        "warning: 1.0 GiB are free on the disk of /data",
    ),
    "disk_speed": (
        host(disk=replace(HOST.disk, write_bytes_per_s=20e6)),
        "warning: the disk of /data writes only 20 MB/s",
    ),
}


@pytest.mark.parametrize(
    ("kind", "machine", "said"), [(k, *v) for k, v in FOUND.items()], ids=FOUND
)
def test_each_fault_is_named_with_its_figures(kind: str, machine: Machine, said: str) -> None:
    finding = only(machine)

    assert finding.kind == kind
    assert f"{finding.severity}: {finding.message}" == said


@pytest.mark.parametrize(
    ("names", "capability", "runs"),
    [
        (FRAMEWORK.capabilities, (6, 1), "machine code"),
        (FRAMEWORK.capabilities, (7, 5), "machine code"),
        (FRAMEWORK.capabilities, (8, 6), "machine code"),
        (FRAMEWORK.capabilities, (9, 0), "machine code"),  # compute_90 is code and PTX
        (FRAMEWORK.capabilities, (10, 0), "PTX"),
        (FRAMEWORK.capabilities, (12, 0), "PTX"),
        (FRAMEWORK.capabilities, (5, 2), None),
        (("sm_80", "sm_90"), (12, 0), None),  # no PTX at all
        (("sm_80", "compute_90"), (7, 5), None),
        (("compute_80",), (9, 0), "PTX"),
        (("sm_90a", "compute_90a"), (9, 0), "machine code"),
        (("sm_90a", "compute_90a"), (10, 0), None),
        (("sm_100f",), (10, 3), "machine code"),
        (("sm_100f",), (12, 0), None),
    ],
)
def test_what_runs_on_a_gpu_follows_from_tensorflows_build_information(
    names: tuple[str, ...], capability: tuple[int, int], runs: str | None
) -> None:
    assert code_for(names, capability) == runs


def test_libraries_that_are_not_installed_are_named_once_with_one_command() -> None:
    missing = tuple(
        Package(name=f"nvidia-{name}-cu12", wanted=">=1", installed=None, fits=False)
        for name in ("cublas", "cudnn")
    )

    first, second = examine(replace(unseen(), packages=missing))

    assert (first.kind, second.kind) == ("cuda_missing", "gpus_unseen")
    assert "nvidia-cublas-cu12, nvidia-cudnn-cu12" in first.message
    assert first.fix == (
        "Install them: pip install 'tensorflow[and-cuda]==2.21.0', or in a checkout of Stoker: make "
        "setup CUDA=1"
    )


def test_libraries_of_the_system_do_as_well_as_packages() -> None:
    assert examine(replace(WELL, packages=(replace(CUDNN, installed=None, fits=False),))) == []


def test_memory_that_its_maker_does_not_correct_is_not_a_fault() -> None:
    assert examine(gpu(ecc=False, ecc_uncorrected=None, ecc_default=False)) == []
    assert examine(gpu(ecc=None, ecc_uncorrected=None)) == []


def test_errors_come_first() -> None:
    both = replace(gpu(persistence=False), framework=replace(FRAMEWORK, gpus=()))

    assert [finding.severity for finding in examine(both)] == ["error", "warning"]


@pytest.mark.parametrize(
    ("limits", "command"),
    [
        ((1024, -1), "ulimit -n 65536"),
        ((1024, 1 << 20), "ulimit -n 65536"),
        ((1024, 8192), "ulimit -n 8192"),
        ((1024, 2048), "sudo tee -a /etc/security/limits.conf"),
    ],
)
def test_open_files_are_raised_as_far_as_one_may(limits: tuple[int, int], command: str) -> None:
    assert command in only(host(open_files=limits[0], open_files_most=limits[1])).fix


@pytest.mark.parametrize(
    ("built", "found", "unfit"),
    [
        (("11.8", "8.6"), {"CUDA": "11.8", "cuDNN": "8.6.0"}, []),
        (("11.8", "8.6"), {"CUDA": "11.2", "cuDNN": "8.9.7"}, []),
        (("11.8", "8.6"), {"CUDA": "12.2", "cuDNN": "8.6.0"}, ["CUDA 12.2, needs 11"]),
        (("11.8", "8.6"), {"cuDNN": "8.2.4"}, ["cuDNN 8.2.4, needs 8.6 or a later 8"]),
        (("11.8", "8.6"), {"cuDNN": "9.1.0"}, ["cuDNN 9.1.0, needs 8"]),
        (("11.8", "8.6"), {}, []),
        ((None, None), {"CUDA": "12.2"}, []),
    ],
)
def test_libraries_are_held_against_what_tensorflow_was_built_for(
    built: tuple[str | None, str | None], found: dict[str, str], unfit: list[str]
) -> None:
    cuda, cudnn = built
    framework = Framework(is_cuda=True, cuda=cuda, cudnn=cudnn, libraries=tuple(found.items()))

    said = [f"{name} {has}, needs {needs}" for name, has, needs in unfit_libraries(framework)]

    assert said == unfit


def test_nccl_of_the_system_or_of_one_gpu_alone_is_not_missed() -> None:
    machine = replace(WELL, packages=(CUDNN, NCCL))
    of_the_system = replace(FRAMEWORK, libraries=(("NCCL", "2.25.1"),))

    assert examine(replace(machine, framework=of_the_system)) == []
    assert (
        examine(replace(WELL, packages=(CUDNN, replace(NCCL, installed="2.25.1", fits=True)))) == []
    )


LIBRARIES = """
#include <stddef.h>
#ifdef RUNTIME
int cudaRuntimeGetVersion(int *version) { *version = 12050; return 0; }
#endif
#ifdef NEURAL
size_t cudnnGetVersion(void) { return NUMBER; }
#endif
#ifdef EXCHANGE
int ncclGetVersion(int *version) { *version = 22703; return 0; }
#endif
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "cudnn"),
    [("90300", "9.3.0"), pytest.param("8907", "8.9.7", marks=pytest.mark.soak)],
)
def test_libraries_of_the_system_are_queried_for_their_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: str, cudnn: str
) -> None:
    """Found as the loader finds them, in a process of its own."""
    source = tmp_path / "libraries.c"
    kinds = {"RUNTIME": "libcudart.so.12", "NEURAL": "libcudnn.so.9", "EXCHANGE": "libnccl.so.2"}
    for kind, name in kinds.items():
        source.write_text(f"#define {kind}\n#define NUMBER {number}\n{LIBRARIES}")
        compiled(source, tmp_path / name)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))

    found = probe_framework(timeout_s=300)

    assert found.error == ""
    assert dict(found.libraries) == {"CUDA": "12.5", "cuDNN": cudnn, "NCCL": "2.27.3"}


def test_libraries_that_were_not_found_are_read_from_the_log() -> None:
    line = "W dso_loader.cc:64] Could not load dynamic library '{0}'; dlerror: {0}: cannot open\n"
    log = (
        line.format("libcudnn.so.9") + line.format("libcublas.so.12") + line.format("libcudnn.so.9")
    )

    assert missing_libraries(log) == ("libcudnn.so.9", "libcublas.so.12")


def linked(*links: tuple[int, int, LinkKind]) -> Gpus:
    states = tuple(replace(GPU, index=index) for index in range(4))
    return Gpus(states=states, links=tuple(Link(gpus=(a, b), kind=kind) for a, b, kind in links))


@pytest.mark.parametrize(
    ("gpus", "groups"),
    [
        (linked(), ((0,), (1,), (2,), (3,))),
        (
            linked((0, 1, "NVLink"), (2, 3, "NVLink"), (0, 2, "system"), (1, 3, "system")),
            ((0, 1), (2, 3)),
        ),
        (linked((0, 1, "NVLink"), (1, 2, "NVLink"), (2, 3, "NVLink")), ((0, 1, 2, 3),)),
        (
            linked((0, 2, "PCIe switch"), (1, 3, "NUMA node"), (0, 1, "system")),
            ((0, 2), (1,), (3,)),
        ),
    ],
)
def test_gpus_with_the_quickest_links_belong_together(
    gpus: Gpus, groups: tuple[tuple[int, ...], ...]
) -> None:
    assert best_groups(gpus) == groups


def test_a_host_is_read_from_the_kernels_files(tmp_path: Path) -> None:
    root = tmp_path / "root"
    files = {
        "proc/meminfo": "MemTotal: 1000 kB\nMemAvailable: 400 kB\nHugePages_Total: 0\n",
        "sys/fs/cgroup/memory.max": "512000\n",
        "sys/bus/pci/devices/0000:01:00.0/vendor": "0x10de\n",
        "sys/bus/pci/devices/0000:01:00.0/class": "0x030200\n",
        "sys/bus/pci/devices/0000:01:00.1/vendor": "0x10de\n",
        "sys/bus/pci/devices/0000:01:00.1/class": "0x040300\n",
        "sys/module/nvidia/version": "580.65.06\n",
        "proc/self/status": "Name:\tpython\nCapEff:\t00000000a80425fb\n",
        "sys/class/infiniband/mlx5_0": "",
        "dev/nvidia0": "",
        "dev/nvidiactl": "",
        "run/.containerenv": "",
        "sys/devices/system/node/node0/cpulist": "0\n",
        "sys/devices/system/node/node1/cpulist": "1\n",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)

    found = read_host(tmp_path / "not" / "yet", measure_disk=False, root=root)

    assert (found.memory_bytes, found.available_bytes) == (1_024_000, 409_600)
    assert found.limit_bytes == 512_000
    assert (found.nvidia_on_bus, found.nvidia_module) == (1, "580.65.06")
    assert found.nvidia_nodes == ("nvidia0",)
    assert found.infiniband == ("mlx5_0",)
    assert (found.numa_nodes, found.shm_bytes) == (2, None)
    assert found.disk.folder == str(tmp_path)
    assert found.disk.write_bytes_per_s is None


@pytest.mark.parametrize(
    ("rights", "locked"),
    [("000001ffffffffff", -1), ("00000000a80425fb", 65536)],
    ids=["root", "root of a container"],
)
def test_limits_are_those_of_the_process(tmp_path: Path, rights: str, locked: int) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/status").write_text(f"CapEff:\t{rights}\n")
    script = (
        "import resource; from pathlib import Path\n"
        "from stoker.cluster.doctor.host import read_host\n"
        "resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))\n"
        "resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))\n"
        f"here = read_host(Path('.'), measure_disk=False, root=Path({str(tmp_path)!r}))\n"
        "print(here.address_space_bytes, here.locked_bytes)"
    )

    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )

    assert done.stdout.split() == [str(8 << 30), str(locked)]


def test_a_disk_is_measured_and_nothing_is_left_on_it(tmp_path: Path) -> None:
    disk = read_host(tmp_path, measure_disk=True).disk

    assert disk.error == ""
    assert disk.write_bytes_per_s is not None
    assert disk.read_bytes_per_s is not None
    assert min(disk.write_bytes_per_s, disk.read_bytes_per_s) > 1e6
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({"memory.max": "1000000\n"}, 1_000_000),
        ({"memory.max": "max\n"}, None),
        ({"memory/memory.limit_in_bytes": "2000000\n"}, 2_000_000),
        ({"memory/memory.limit_in_bytes": "9223372036854771712\n"}, None),
        ({}, None),
    ],
)
def test_a_containers_limit_of_memory_is_read_in_either_version(
    tmp_path: Path, files: dict[str, str], limit: int | None
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)

    assert memory_limit(tmp_path) == limit
