"""`stoker doctor`: checks whether this machine is ready for training."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.cli.options import AsJson
from stoker.core.errors import EXIT_CHECK

if TYPE_CHECKING:
    from stoker.cluster.doctor.examine import Machine
    from stoker.core.errors import Finding


def doctor(
    folder: Annotated[
        Path, typer.Option("--disk", help="Folder for runs; its disk is measured.")
    ] = Path(),
    no_disk: Annotated[
        bool, typer.Option("--no-disk", help="Do not measure the disk, which writes a file.")
    ] = False,
    timeout_s: Annotated[
        float,
        typer.Option("--timeout-s", min=0.01, help="Maximum time for TensorFlow's start, seconds."),
    ] = 120.0,
    as_json: AsJson = False,
) -> None:
    """Check the machine: driver, CUDA, GPUs, memory, disk.

    Exit code 3 if it finds an error.
    """
    from stoker.cluster.doctor.examine import Machine, examine
    from stoker.cluster.doctor.framework import cuda_packages, probe_framework
    from stoker.cluster.doctor.gpus import best_groups, read_gpus
    from stoker.cluster.doctor.host import read_host

    machine = Machine(
        host=read_host(folder.absolute(), measure_disk=not no_disk),
        gpus=read_gpus(),
        framework=probe_framework(timeout_s=timeout_s),
        packages=cuda_packages(),
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
    )
    findings = examine(machine)
    groups = best_groups(machine.gpus)
    if as_json:
        found = asdict(machine) | {"gpu_groups": groups, "findings": list(map(asdict, findings))}
        typer.echo(json.dumps(found, indent=2))
    else:
        for line in (*_facts(machine, groups), "", *_finding_lines(findings)):
            typer.echo(line)
    if any(finding.severity == "error" for finding in findings):
        raise typer.Exit(EXIT_CHECK)


def _facts(machine: Machine, groups: tuple[tuple[int, ...], ...]) -> Iterator[str]:
    host, gpus, framework = machine.host, machine.gpus, machine.framework
    yield _row("cores", f"{host.cores}, {host.numa_nodes} NUMA node(s)")
    limit = "" if host.limit_bytes is None else f", limited to {_gib(host.limit_bytes)}"
    yield _row("memory", f"{_gib(host.memory_bytes)}, {_gib(host.available_bytes)} free{limit}")
    if host.shm_bytes is not None:
        yield _row("/dev/shm", f"{_gib(host.shm_bytes)}")  # noqa: S108 - its size
    most = "no limit" if host.open_files < 0 else str(host.open_files)
    yield _row("open files", most)
    if host.infiniband:
        yield _row("InfiniBand", ", ".join(host.infiniband))
    yield _row("container", host.container or "none")
    yield _row("disk", _disk(machine))
    cuda = "" if gpus.cuda is None else f", runs CUDA up to {gpus.cuda[0]}.{gpus.cuda[1]}"
    yield _row("driver", f"{gpus.driver}{cuda}" if gpus.driver else f"none ({gpus.unread})")
    for state in gpus.states:
        used = f"{_gib(state.used_bytes)} of {_gib(state.memory_bytes)} used"
        yield _row(f"GPU {state.index}", f"{state.name}, {used}")
    for link in gpus.links:
        yield _row(f"GPU {link.gpus[0]}-{link.gpus[1]}", link.kind)
    if len(gpus.states) > 1:
        yield _row("together", "; ".join(", ".join(map(str, group)) for group in groups))
    if framework.version is not None:
        built = f", built for CUDA {framework.cuda}, cuDNN {framework.cudnn}"
        seen = f"{len(framework.gpus)} GPU(s) seen"
        yield _row("TensorFlow", f"{framework.version}{built if framework.is_cuda else ''}; {seen}")


def _disk(machine: Machine) -> str:
    disk = machine.host.disk
    free = f"{_gib(disk.free_bytes)} free at {disk.folder}"
    if disk.write_bytes_per_s is None or disk.read_bytes_per_s is None:
        return f"{free}, speed not measured{f': {disk.error}' if disk.error else ''}"
    wrote, read = disk.write_bytes_per_s / 1e6, disk.read_bytes_per_s / 1e6
    return f"{free}, writes {wrote:.0f} MB/s, reads {read:.0f} MB/s"


def _finding_lines(findings: list[Finding]) -> Iterator[str]:
    if not findings:
        yield "Nothing is wrong."
    for finding in findings:
        yield f"{finding.severity}: {finding.message}."
        yield f"  {finding.fix}"


def _row(name: str, value: str) -> str:
    return f"{name:<11} {value}"


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.1f} GiB"
