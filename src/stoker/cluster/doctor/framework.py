"""Examines the installed TensorFlow: its build, its libraries, and the devices that it sees."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Literal

from packaging.requirements import Requirement
from packaging.version import Version

EXTRA = "and-cuda"
"""Name of the extra of the `tensorflow` package that installs CUDA, cuDNN and NCCL as Python packages."""

DRIVERS: dict[int, str] = {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}
"""Major version of CUDA -> version of the oldest Linux driver that supports it.

Source: NVIDIA, CUDA compatibility, minor version compatibility.
"""

_PROBE = """\
import ctypes, json, sys
import tensorflow as tf
build = dict(tf.sysconfig.get_build_info())

def number(names, function, by_pointer):
    for name in names:
        try:
            ask = getattr(ctypes.CDLL(name), function)
        except (OSError, AttributeError):
            continue
        if not by_pointer:
            ask.restype = ctypes.c_size_t
            return ask()
        found = ctypes.c_int()
        if ask(ctypes.byref(found)) == 0:
            return found.value
    return None

def names(library, endings, built):
    # Several may be installed next to each other: TensorFlow loads the one it was built for.
    major = (built or "").split(".")[0]
    ordered = sorted(endings, key=lambda ending: ending.split(".")[0] != major)
    return [f"{library}.so.{ending}" for ending in ordered]

gpus = [device.name for device in tf.config.list_physical_devices("GPU")]
cudart = names("libcudart", ["13", "12", "11.0", "10.1"], build.get("cuda_version"))
cudnn = names("libcudnn", ["9", "8", "7"], build.get("cudnn_version"))
print(json.dumps({
    "version": tf.__version__,
    "is_cuda": bool(build.get("is_cuda_build")),
    "cuda": build.get("cuda_version"),
    "cudnn": build.get("cudnn_version"),
    "capabilities": list(build.get("cuda_compute_capabilities") or []),
    "gpus": gpus,
    "cudart": number(cudart, "cudaRuntimeGetVersion", True),
    "libcudnn": number(cudnn, "cudnnGetVersion", False),
    "nccl": number(["libnccl.so.2"], "ncclGetVersion", True),
}))
"""
"""Python code that prints the facts as JSON. It runs in a separate process, because a broken driver can end a process
or make it hang."""

TAIL_LINES = 5
"""Number of last lines of output to show if TensorFlow does not start."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Framework:
    """What TensorFlow reports about itself."""

    version: str | None = None
    """Version of TensorFlow; None if it is not installed or does not start."""

    is_cuda: bool = False
    """Whether TensorFlow was built for NVIDIA's GPUs."""

    cuda: str | None = None
    """Version of CUDA that TensorFlow was built with."""

    cudnn: str | None = None
    """Version of cuDNN that TensorFlow was built with."""

    capabilities: tuple[str, ...] = ()
    """Kinds of GPUs for which TensorFlow has machine code (`sm_80`), or machine code and PTX (`compute_90`)."""

    gpus: tuple[str, ...] = ()
    """Names of the GPUs that TensorFlow sees."""

    libraries: tuple[tuple[str, str], ...] = ()
    """Names and versions of CUDA, cuDNN and NCCL that TensorFlow finds, as Python packages or on the system."""

    missing: tuple[str, ...] = ()
    """File names of libraries that TensorFlow did not find."""

    error: str = ""
    """Why TensorFlow does not start; empty if it starts."""

    hangs: bool = False
    """Whether TensorFlow did not start within the time limit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Package:
    """One of NVIDIA's packages that this TensorFlow requires for CUDA."""

    name: str
    wanted: str
    """Versions that TensorFlow requires, e.g. `<13.0,>=12.5`."""

    installed: str | None
    fits: bool


def probe_framework(*, timeout_s: float) -> Framework:
    """Start TensorFlow in a separate process and return its facts.

    Args:
        timeout_s: Time limit, seconds.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE],
            env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "0"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Framework(error=f"it did not start within {timeout_s:g} s", hangs=True)
    if done.returncode:
        tail = " / ".join(done.stderr.strip().splitlines()[-TAIL_LINES:])
        return Framework(error=f"exit code {done.returncode}: {tail}")
    facts = json.loads(done.stdout.strip().splitlines()[-1])
    facts |= {name: tuple(facts[name]) for name in ("capabilities", "gpus")}
    libraries = tuple(_libraries(facts))
    return Framework(**facts, libraries=libraries, missing=missing_libraries(done.stderr))


def _libraries(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield names and versions of libraries; remove their encoded version numbers from `facts`.

    Source: CUDA_VERSION of cuda.h; CUDNN_VERSION of cudnn_version.h (major version times 10,000 since version 9, times
    1,000 before); NCCL_VERSION of nccl.h (times 10,000 since version 2.9, times 1,000 before).
    """
    if (cudart := facts.pop("cudart")) is not None:
        yield "CUDA", f"{cudart // 1000}.{cudart % 1000 // 10}"
    for name, key in (("cuDNN", "libcudnn"), ("NCCL", "nccl")):
        if (number := facts.pop(key)) is not None:
            base = 10_000 if number >= 10_000 else 1_000
            yield name, f"{number // base}.{number % base // 100}.{number % 100}"


def missing_libraries(log: str) -> tuple[str, ...]:
    """Return the shared libraries that TensorFlow could not load, according to its log."""
    return tuple(dict.fromkeys(re.findall(r"Could not load dynamic library '([^']+)'", log)))


def cuda_packages(distribution: str = "tensorflow") -> tuple[Package, ...]:
    """Return NVIDIA's packages that the installed TensorFlow requires, and their installed versions.

    Source: the package's own metadata, the extra `and-cuda`.
    """
    try:
        lines = metadata.requires(distribution) or []
    except metadata.PackageNotFoundError:
        return ()
    found = []
    for requirement in map(Requirement, lines):
        if requirement.marker is None or not requirement.name.startswith("nvidia-"):
            continue
        if not requirement.marker.evaluate({"extra": EXTRA}):
            continue
        installed = _installed(requirement.name)
        fits = installed is not None and requirement.specifier.contains(installed)
        found.append(
            Package(
                name=requirement.name,
                wanted=str(requirement.specifier),
                installed=installed,
                fits=fits,
            )
        )
    return tuple(found)


def unfit_libraries(framework: Framework) -> Iterator[tuple[str, str, str]]:
    """Yield unsuitable libraries: name, version, and the version that TensorFlow needs.

    CUDA must have the major version that TensorFlow was built with; its minor versions are compatible. cuDNN must also
    have the major version that TensorFlow was built with, and its minor version must not be older.

    Source: NVIDIA, CUDA compatibility; TensorFlow's own check of a loaded cuDNN.
    """
    for name, built in (("CUDA", framework.cuda), ("cuDNN", framework.cudnn)):
        found = dict(framework.libraries).get(name)
        if found is None or not built:
            continue
        have, need = Version(found).release, Version(built).release
        same_major = have[0] == need[0]
        if not same_major:
            yield name, found, f"{need[0]}"
        elif name == "cuDNN" and have[: len(need)] < need:
            yield name, found, f"{built} or a later {need[0]}"


def code_for(
    names: Iterable[str], capability: tuple[int, int]
) -> Literal["machine code", "PTX"] | None:
    """Return which kind of code a TensorFlow build has for a GPU.

    `sm_80` means machine code for compute capabilities 8.0 to 8.9. `compute_90` means machine code for 9.x, and PTX,
    which the driver compiles for 9.0 and all later capabilities. A suffix restricts the code to a single capability
    (`sm_90a`) or to a family (`f`).

    Args:
        names: Capabilities of the build, e.g. `sm_80`, as TensorFlow's build information lists them.
        capability: The GPU's compute capability, major and minor.

    Returns:
        The kind of code that the driver would load; None if this TensorFlow cannot run on the GPU.

    Source: TensorFlow, third_party/gpus/cuda_configure.bzl; NVIDIA, CUDA C++ programming guide, compute
        capability; the code in TensorFlow 2.21's wheel (sm_60 to sm_90, PTX for 9.0).
    """
    major, minor = capability
    own = 10 * major + minor
    parsed = [match.groups() for name in names if (match := _CODE.fullmatch(name))]
    codes = [(kind, int(number), suffix) for kind, number, suffix in parsed]
    for _, number, suffix in codes:
        if number == own or (suffix != "a" and number // 10 == major and number < own):
            return "machine code"
    if any(kind == "compute" and not suffix and number < own for kind, number, suffix in codes):
        return "PTX"
    return None


_CODE = re.compile(r"(sm|compute)_(\d+)([af]?)")


def oldest_driver(cuda: str) -> str | None:
    """Return the version of the oldest driver for a version of CUDA; None if unknown."""
    return DRIVERS.get(Version(cuda).release[0])


def is_older(version: str, than: str) -> bool:
    """Return whether a driver's version is older than another."""
    return Version(version) < Version(than)


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
