"""Finds problems of a machine; each finding has a command that fixes the problem."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from stoker.cluster.doctor.framework import (
    Framework,
    Package,
    code_for,
    is_older,
    oldest_driver,
    unfit_libraries,
)
from stoker.cluster.doctor.gpus import Gpus, GpuState
from stoker.cluster.doctor.host import Host
from stoker.core.errors import Finding

MIN_SHM_BYTES = 1 << 30
"""Minimum free space of /dev/shm. With less, NCCL between the GPUs of a machine, and data loaders with several
processes, fail or slow down. Docker's default is 64 MiB."""

MIN_FILES = 4096
"""Smallest sufficient limit of open files: each shard, connection and library takes one."""

MIN_ADDRESS_SPACE = 256 << 30
"""Smallest sufficient limit of a process's address space, bytes: CUDA maps the memory of the machine and of each GPU,
and glibc maps 64 MiB for the memory arena of each thread."""

MIN_THREADS_A_CORE = 256
"""Smallest sufficient limit of the user's processes and threads, per core: each process has several pools with one
thread per core."""

MIN_LOCKED_BYTES = 1 << 30
"""Smallest sufficient limit of locked memory, bytes, for NCCL, which locks its buffers for InfiniBand. NCCL's
documentation requires it to be unlimited."""

MIN_AVAILABLE_BYTES = 2 << 30
"""Minimum free memory, bytes: enough for TensorFlow and one or two batches."""

MIN_DISK_BYTES_PER_S = 100e6
"""Minimum speed of the disk: at this speed, 1,000 JPEGs of 100 KB can be read per second."""

MIN_FREE_BYTES = 10 << 30
"""Minimum free space on the disk, bytes, for shards, checkpoints and exported models."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """All facts about a machine that the rules check."""

    host: Host
    gpus: Gpus
    framework: Framework
    packages: tuple[Package, ...] = ()
    visible: str | None = None
    """CUDA_VISIBLE_DEVICES; None if it is not set."""


def examine(machine: Machine) -> list[Finding]:
    """Return all findings, errors first."""
    found = [finding for rule in RULES for finding in rule(machine)]
    return sorted(found, key=lambda finding: finding.severity != "error")


def _framework_starts(machine: Machine) -> Iterator[Finding]:
    if machine.framework.version is None:
        yield Finding.error(
            "tensorflow_start",
            f"TensorFlow does not start: {machine.framework.error}",
            "Give it longer: stoker doctor --timeout-s 600. On a GPU see too whether the driver answers: "
            "nvidia-smi"
            if machine.framework.hangs
            else "Install it again: pip install --force-reinstall tensorflow",
        )


def _driver_answers(machine: Machine) -> Iterator[Finding]:
    host, gpus = machine.host, machine.gpus
    if gpus.driver is not None:
        return
    if host.container and host.nvidia_module and not host.nvidia_nodes:
        yield Finding.error(
            "container_gpus",
            f"the machine has NVIDIA's driver {host.nvidia_module}, and this container none of its GPUs",
            f"Start the container with them: {_container_flag(host)}",
        )
    elif host.nvidia_on_bus and host.nvidia_module is None:
        yield Finding.error(
            "driver_missing",
            f"{_count(host.nvidia_on_bus, 'NVIDIA GPU')} on the PCI bus, but no driver is loaded",
            "Install it and restart the machine: sudo apt-get install -y nvidia-driver && sudo reboot",
        )
    elif host.nvidia_module or host.nvidia_on_bus:
        yield Finding.error(
            "driver_broken",
            f"NVIDIA's driver does not answer ({gpus.unread}), though the kernel has its module "
            f"{host.nvidia_module or ''}".rstrip(),
            "Restart the machine, which is necessary after an update of the driver: sudo reboot",
        )


def _driver_fits(machine: Machine) -> Iterator[Finding]:
    cuda, driver = machine.framework.cuda, machine.gpus.driver
    if not cuda or driver is None or not machine.framework.is_cuda:
        return
    oldest = oldest_driver(cuda)
    if oldest is not None and is_older(driver, oldest):
        yield Finding.error(
            "driver_old",
            f"TensorFlow {machine.framework.version} is built for CUDA {cuda}, which needs a driver "
            f"of {oldest} or newer; here is {driver}",
            f"Install a newer driver: sudo apt-get install -y nvidia-driver-{oldest.split('.')[0]}",
        )


def _packages_fit(machine: Machine) -> Iterator[Finding]:
    if machine.gpus.driver is None or not machine.framework.is_cuda:
        return
    wrong = [package for package in machine.packages if not package.fits]
    install = f"pip install 'tensorflow[and-cuda]=={machine.framework.version}'"
    missing = [package.name for package in wrong if package.installed is None]
    if missing and not machine.framework.gpus:
        yield Finding.error(
            "cuda_missing",
            f"TensorFlow's CUDA libraries are not installed: {_listed(missing)}",
            f"Install them: {install}, or in a checkout of Stoker: make setup CUDA=1",
        )
    for package in wrong:
        if package.installed is not None:
            yield Finding.error(
                "cuda_version",
                f"{package.name} is {package.installed}, and TensorFlow {machine.framework.version} "
                f"needs {package.wanted}",
                f"Install what fits: {install}",
            )


def _libraries_fit(machine: Machine) -> Iterator[Finding]:
    framework = machine.framework
    if machine.gpus.driver is None or not framework.is_cuda:
        return
    install = f"Install what fits: pip install 'tensorflow[and-cuda]=={framework.version}'"
    for name, found, needed in unfit_libraries(framework):
        yield Finding.error(
            "library_version",
            f"the {name} that is found is {found}, and TensorFlow {framework.version} was built for "
            f"{needed}",
            f"{install}; what LD_LIBRARY_PATH names comes first: unset LD_LIBRARY_PATH",
        )
    nccl = [package for package in machine.packages if package.name.startswith("nvidia-nccl")]
    installed = any(package.installed for package in nccl) or "NCCL" in dict(framework.libraries)
    if nccl and len(framework.gpus) > 1 and not installed:
        yield Finding.warning(
            "nccl_missing",
            f"TensorFlow sees {_count(len(framework.gpus), 'GPU')} and NCCL is missing: gradients "
            "cannot be exchanged between them by it",
            f"Install it: pip install 'tensorflow[and-cuda]=={framework.version}'",
        )


def _gpus_are_seen(machine: Machine) -> Iterator[Finding]:
    framework, gpus = machine.framework, machine.gpus
    shown, seen = len(gpus.states), len(framework.gpus)
    if framework.version is None or not shown or seen >= shown:
        return
    what = f"the driver has {_count(shown, 'GPU')} and TensorFlow sees {seen or 'none'}"
    if not framework.is_cuda:
        yield Finding.error(
            "tensorflow_cpu",
            f"{what}: this TensorFlow is built without CUDA",
            "Install one with CUDA: pip uninstall -y tensorflow-cpu; pip install 'tensorflow[and-cuda]'",
        )
    elif machine.visible is not None:
        yield Finding.warning(
            "gpus_hidden",
            f"{what}: CUDA_VISIBLE_DEVICES is {machine.visible!r}",
            "Make all GPUs visible: unset CUDA_VISIBLE_DEVICES",
        )
    elif framework.missing:
        yield Finding.error(
            "library_missing",
            f"{what}: it did not find {_listed(framework.missing)}",
            f"Install them: pip install 'tensorflow[and-cuda]=={framework.version}'",
        )
    elif any(state.mig for state in gpus.states):
        yield Finding.warning(
            "mig",
            f"{what}: a GPU in MIG mode can be used only through its instances, one per process",
            "Choose an instance: export CUDA_VISIBLE_DEVICES=$(nvidia-smi -L | grep -om1 'MIG-[0-9a-f-]*')",
        )
    else:
        yield Finding.error(
            "gpus_unseen",
            f"{what}; TensorFlow's log gives the reason",
            "Print the log: TF_CPP_MIN_LOG_LEVEL=0 python -c "
            "'import tensorflow as tf; print(tf.config.list_physical_devices())'",
        )


def _code_for_gpus(machine: Machine) -> Iterator[Finding]:
    names = machine.framework.capabilities
    if not machine.framework.is_cuda or not names:
        return
    for state in machine.gpus.states:
        kind = code_for(names, state.compute_capability)
        capability = "{}.{}".format(*state.compute_capability)
        gpu = f"GPU {state.index} ({state.name}, compute capability {capability})"
        if kind == "PTX":
            yield Finding.warning(
                "gpu_new",
                f"this TensorFlow has no machine code for {gpu}: the driver compiles it from PTX at the "
                "first start, which can take many minutes",
                "Keep the compiled code for later starts: "
                "export CUDA_CACHE_MAXSIZE=4294967296 CUDA_CACHE_PATH=$HOME/.nv/ComputeCache",
            )
        elif kind is None:
            yield Finding.error(
                "gpu_code",
                f"this TensorFlow does not run on {gpu}: it has code for {_listed(names)}",
                "Install an older TensorFlow for an old GPU, or a newer one for a new GPU; list all "
                "versions: pip index versions tensorflow",
            )


def _gpu_states(machine: Machine) -> Iterator[Finding]:
    for state in machine.gpus.states:
        yield from _gpu_state(state)


def _gpu_state(state: GpuState) -> Iterator[Finding]:
    gpu = f"GPU {state.index} ({state.name})"
    if state.ecc_uncorrected:
        yield Finding.error(
            "ecc",
            f"{gpu} has had {_count(state.ecc_uncorrected, 'memory error')} that could not be "
            "corrected: what it computes may be wrong",
            f"Check it, restart the machine, and have the GPU replaced if it happens again: nvidia-smi -q -d ECC -i {state.index}",
        )
    if state.ecc is False and state.ecc_default:
        yield Finding.warning(
            "ecc_off",
            f"{gpu} has its correction of memory errors switched off: a flipped bit is computed with, "
            "unnoticed",
            f"Switch it on, and restart the machine: sudo nvidia-smi -e 1 -i {state.index}",
        )
    if state.persistence is False:
        yield Finding.warning(
            "persistence",
            f"{gpu} is powered down when no process uses it: the first use takes some seconds longer",
            f"Keep the driver loaded: sudo nvidia-smi -pm 1 -i {state.index}",
        )
    if state.slowed_by:
        yield Finding.warning(
            "throttled",
            f"{gpu} runs slower than it could because of {_listed(state.slowed_by)}{_figures(state)}",
            f"Look at heat, air and the power limit: nvidia-smi -q -d PERFORMANCE,POWER,TEMPERATURE -i {state.index}",
        )
    width, most = state.pcie_width, state.pcie_most_width
    if width is not None and most is not None and width < most:
        yield Finding.warning(
            "pcie_width",
            f"{gpu} uses {width} of {most} PCIe lanes: input reaches it at {width / most:.0%} of the speed",
            f"Look at its slot and riser: sudo lspci -vv -s {state.pci} | grep -i lnksta",
        )
    if state.processes:
        who = [
            f"{each.name or 'a process of another container'} ({each.pid})"
            for each in state.processes
        ]
        held = state.used_bytes / 2**30
        yield Finding.warning(
            "gpu_in_use",
            f"{gpu} is used by {_listed(who)}, with {held:.1f} of {state.memory_bytes / 2**30:.0f} GiB taken",
            "Use another GPU, or ask its owner to end the process: nvidia-smi --query-compute-apps=pid,name,used_memory --format=csv",
        )


def _figures(state: GpuState) -> str:
    parts = []
    if state.clock_mhz is not None and state.clock_most_mhz is not None:
        parts.append(f"{state.clock_mhz} of {state.clock_most_mhz} MHz")
    if state.temperature_c is not None:
        parts.append(f"{state.temperature_c} °C")
    if state.power_w is not None and state.power_limit_w is not None:
        parts.append(f"{state.power_w:.0f} of {state.power_limit_w:.0f} W")
    return f" ({', '.join(parts)})" if parts else ""


def _host_memory(machine: Machine) -> Iterator[Finding]:
    host = machine.host
    if host.available_bytes < MIN_AVAILABLE_BYTES:
        yield Finding.warning(
            "memory",
            f"{_gib(host.available_bytes)} of {_gib(host.memory_bytes)} memory are free",
            "See which processes use the memory: ps aux --sort=-rss | head",
        )
    if host.limit_bytes is not None and host.limit_bytes < host.memory_bytes // 2:
        yield Finding.warning(
            "memory_limit",
            f"this process may use {_gib(host.limit_bytes)} of the machine's {_gib(host.memory_bytes)}",
            "Raise the container's or the job's limit, e.g. docker run --memory=... or sbatch --mem=...",
        )
    shm, free = host.shm_bytes, host.shm_free_bytes
    if shm is not None and free is not None and free < MIN_SHM_BYTES:
        yield Finding.warning(
            "shm",
            f"/dev/shm has {_gib(shm)}, {_gib(free)} free: exchange between processes fails or is slow",  # noqa: S108 - its size
            {
                "kubernetes": "Mount a volume there: emptyDir: {medium: Memory, sizeLimit: 8Gi}",
                None: "Make it larger: sudo mount -o remount,size=8G /dev/shm",
            }.get(
                host.container,
                "Start the container with a larger one: docker run --shm-size=8g ...",
            ),
        )


def _host_files(machine: Machine) -> Iterator[Finding]:
    host = machine.host
    if 0 <= host.open_files < MIN_FILES:
        may = host.open_files_most < 0 or host.open_files_most >= MIN_FILES
        yield Finding.warning(
            "open_files",
            f"a process started from this shell may open at most {host.open_files} files",
            "Raise it: ulimit -n 65536"
            if may and not 0 <= host.open_files_most < 65536
            else f"Raise it: ulimit -n {host.open_files_most}"
            if may
            else "Raise it: echo '* - nofile 65536' | sudo tee -a /etc/security/limits.conf, and log in again",
        )


def _host_limits(machine: Machine) -> Iterator[Finding]:
    host = machine.host
    if 0 <= host.address_space_bytes < MIN_ADDRESS_SPACE:
        yield Finding.warning(
            "address_space",
            f"a process started from this shell may map at most {_gib(host.address_space_bytes)} of "
            "address space: TensorFlow and CUDA map far more than they use, and fail to start",
            "Remove the limit: ulimit -v unlimited",
        )
    if 0 <= host.processes < MIN_THREADS_A_CORE * host.cores:
        yield Finding.warning(
            "processes",
            f"your user may have at most {host.processes} processes and threads, on {_count(host.cores, 'core')}",
            f"Raise it: ulimit -u {MIN_THREADS_A_CORE * host.cores}",
        )
    if host.infiniband and 0 <= host.locked_bytes < MIN_LOCKED_BYTES:
        yield Finding.warning(
            "locked_memory",
            f"a process may lock at most {_gib(host.locked_bytes)} of memory: NCCL cannot exchange data over "
            f"{_listed(host.infiniband)}",
            "Remove the limit: echo '* - memlock unlimited' | sudo tee -a "
            "/etc/security/limits.conf, and log in again (a container: docker run --ulimit memlock=-1)",
        )


def _host_disk(machine: Machine) -> Iterator[Finding]:
    disk = machine.host.disk
    if disk.free_bytes < MIN_FREE_BYTES:
        yield Finding.warning(
            "disk_space",
            f"{_gib(disk.free_bytes)} are free on the disk of {disk.folder}",
            f"See what is large: du -xh --max-depth=2 {disk.folder} | sort -h | tail",
        )
    for verb, speed in (("reads", disk.read_bytes_per_s), ("writes", disk.write_bytes_per_s)):
        if speed is not None and speed < MIN_DISK_BYTES_PER_S:
            yield Finding.warning(
                "disk_speed",
                f"the disk of {disk.folder} {verb} only {speed / 1e6:.0f} MB/s",
                "Put runs and shards on a faster one: --set runs=/path/on/the/fast/disk",
            )


Rule = Callable[[Machine], Iterator[Finding]]

RULES: tuple[Rule, ...] = (
    _framework_starts,
    _driver_answers,
    _driver_fits,
    _packages_fit,
    _libraries_fit,
    _gpus_are_seen,
    _code_for_gpus,
    _gpu_states,
    _host_memory,
    _host_files,
    _host_limits,
    _host_disk,
)


def _container_flag(host: Host) -> str:
    flags = {
        "kubernetes": "resources: {limits: {nvidia.com/gpu: 1}}, with NVIDIA's device plugin",
        "podman": "podman run --device nvidia.com/gpu=all ...",
    }
    return flags.get(
        host.container or "", "docker run --gpus all ... (needs nvidia-container-toolkit)"
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _listed(names: list[str] | tuple[str, ...]) -> str:
    return ", ".join(names)


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.1f} GiB"
