"""TensorFlow as it is installed: what it was built for, what lies beside it, which devices it sees."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata

from packaging.requirements import Requirement
from packaging.version import Version

EXTRA = "and-cuda"
"""The extra of TensorFlow's package that brings CUDA, cuDNN and NCCL as packages."""

PAIRS: dict[str, tuple[str, str]] = {
    "2.20": ("12.5", "9.3"),
    "2.19": ("12.5", "9.3"),
    "2.18": ("12.5", "9.3"),
    "2.17": ("12.3", "8.9"),
    "2.16": ("12.3", "8.9"),
    "2.15": ("12.2", "8.9"),
    "2.14": ("11.8", "8.7"),
    "2.13": ("11.8", "8.6"),
    "2.12": ("11.8", "8.6"),
    "2.11": ("11.2", "8.1"),
    "2.10": ("11.2", "8.1"),
    "2.9": ("11.2", "8.1"),
    "2.8": ("11.2", "8.1"),
    "2.7": ("11.2", "8.1"),
    "2.6": ("11.2", "8.1"),
    "2.5": ("11.2", "8.1"),
    "2.4": ("11.0", "8.0"),
}
"""TensorFlow -> CUDA and cuDNN that it was built and tested with; a newer one says so itself.

Source: tensorflow.org/install/source, tested build configurations (GPU).
"""

DRIVERS: dict[int, str] = {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}
"""Major version of CUDA -> the oldest Linux driver that runs it.

Source: NVIDIA, CUDA compatibility, minor version compatibility.
"""

_PROBE = """\
import json, sys
import tensorflow as tf
build = dict(tf.sysconfig.get_build_info())
print(json.dumps({
    "version": tf.__version__,
    "is_cuda": bool(build.get("is_cuda_build")),
    "cuda": build.get("cuda_version"),
    "cudnn": build.get("cudnn_version"),
    "capabilities": list(build.get("cuda_compute_capabilities") or []),
    "gpus": [device.name for device in tf.config.list_physical_devices("GPU")],
}))
"""
"""Run in a process of its own: a broken driver can end it, or make it hang."""

TAIL_LINES = 5
"""Last lines that are shown of a TensorFlow that does not start."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Framework:
    """What TensorFlow says of itself."""

    version: str | None = None
    """None: it is not installed, or does not start."""

    is_cuda: bool = False
    """Whether it was built for NVIDIA's GPUs."""

    cuda: str | None = None
    """The CUDA that it was built with."""

    cudnn: str | None = None
    """The cuDNN that it was built with."""

    capabilities: tuple[str, ...] = ()
    """What it has machine code for (`sm_80`), and what can be made of (`compute_90`)."""

    gpus: tuple[str, ...] = ()
    """The GPUs that it sees."""

    missing: tuple[str, ...] = ()
    """Libraries that it looked for and did not find."""

    error: str = ""
    """Why it does not start."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Package:
    """One of NVIDIA's packages that this TensorFlow asks for where it is installed with CUDA."""

    name: str
    wanted: str
    """Versions that fit."""

    installed: str | None
    fits: bool


def probe_framework(*, timeout_s: float) -> Framework:
    """Start TensorFlow in a process of its own, and ask it.

    Args:
        timeout_s: Longest that it may take.
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
        return Framework(error=f"it did not start within {timeout_s:g} s")
    if done.returncode:
        tail = " / ".join(done.stderr.strip().splitlines()[-TAIL_LINES:])
        return Framework(error=f"exit code {done.returncode}: {tail}")
    told = json.loads(done.stdout.strip().splitlines()[-1])
    told |= {name: tuple(told[name]) for name in ("capabilities", "gpus")}
    return Framework(**told, missing=missing_libraries(done.stderr))


def missing_libraries(log: str) -> tuple[str, ...]:
    """The shared libraries that TensorFlow's log says it could not load."""
    return tuple(dict.fromkeys(re.findall(r"Could not load dynamic library '([^']+)'", log)))


def cuda_packages(distribution: str = "tensorflow") -> tuple[Package, ...]:
    """NVIDIA's packages that the installed TensorFlow asks for, and what is there of them.

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


def built_for(framework: Framework) -> tuple[str, str] | None:
    """The CUDA and cuDNN of a TensorFlow: what it says, else what is known of its version."""
    if framework.cuda and framework.cudnn:
        return framework.cuda, framework.cudnn
    if framework.version is None:
        return None
    release = Version(framework.version).release
    return PAIRS.get(f"{release[0]}.{release[1]}")


def oldest_driver(cuda: str) -> str | None:
    """The oldest driver for a version of CUDA, None where it is not known."""
    return DRIVERS.get(Version(cuda).release[0])


def is_older(version: str, than: str) -> bool:
    """Whether a driver's version comes before another."""
    return Version(version) < Version(than)


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
