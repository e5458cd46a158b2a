"""What each of several processes on one machine gets of its cores, threads and GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stoker.core.errors import ConfigError, Plain

THREADS = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS")
"""Environment variables by which libraries are told how many threads compute at once."""

GPUS = "CUDA_VISIBLE_DEVICES"
"""Environment variable by which CUDA is told which GPUs there are."""


def share_cores(cores: Sequence[int], processes: int) -> list[tuple[int, ...]]:
    """Cut the cores into equal parts of neighbours; what is left over goes to nobody.

    Args:
        cores: Numbers of the cores that may be used.
        processes: How many parts.

    Raises:
        ConfigError: there are fewer cores than processes.
    """
    each = len(cores) // processes
    if not each:
        raise ConfigError(
            "--pin needs a core for each process",
            got=Plain(f"{processes} processes, {len(cores)} cores"),
            fix="Leave --pin out, or start fewer workers.",
        )
    in_order = sorted(cores)
    return [tuple(in_order[rank * each : (rank + 1) * each]) for rank in range(processes)]


def share_threads(environ: Mapping[str, str], *, cores: int, processes: int) -> dict[str, str]:
    """Thread counts by which N processes compute on no more cores than there are.

    Args:
        environ: What the user has set is let be.
        cores: How many may be used by all together.
        processes: How many share them.
    """
    each = str(max(1, cores // processes))
    return {name: each for name in THREADS if name not in environ}


def share_gpus(names: Sequence[str], *, processes: int) -> list[dict[str, str]]:
    """Equal parts of the GPUs for each process, as environment variables.

    Args:
        names: The GPUs that may be used, as `CUDA_VISIBLE_DEVICES` names them.
        processes: How many share them.

    Raises:
        ConfigError: there are GPUs, but fewer than processes: two on one would wait for each other.
    """
    if not names:
        return [{} for _ in range(processes)]
    each = len(names) // processes
    if not each:
        raise ConfigError(
            "--workers must be at most the number of GPUs",
            got=Plain(f"{processes} workers, {len(names)} GPUs"),
            fix=f"Start {len(names)}, or set {GPUS}=-1 to train on the CPU.",
        )
    parts = [names[rank * each : (rank + 1) * each] for rank in range(processes)]
    return [{GPUS: ",".join(part)} for part in parts]
