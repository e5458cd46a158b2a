"""The work of `stoker monitor exporter`: serves metrics of GPUs and of the machine, and the scrape targets."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from stoker.core.errors import ConfigError
from stoker.monitor.discovery import Discovery
from stoker.telemetry.exposition import text_of
from stoker.telemetry.gpu.sampler import EVERY_S, GpuSampler
from stoker.telemetry.host import host_families
from stoker.telemetry.scrape_server import Page, ScrapeServer

PORT = 9401
"""Default port; dcgm-exporter, which may run next to it, has 9400."""

_SHORTEST_S = 0.1
"""Minimum time between two samples of GPM, seconds. Source: NVML API reference, `nvmlGpmSampleGet`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExporterConfig:
    """Settings of an exporter."""

    host: str = "127.0.0.1"
    """Address to listen on."""

    port: int = PORT
    """Port to listen on; 0: any free port."""

    runs: Path = Path("runs")
    """Folder of the runs, where they publish their addresses; metrics of its disk are reported."""

    servers: tuple[str, ...] = ()
    """Addresses of the servers on this machine, HOST:PORT."""

    every_s: float = EVERY_S
    """Interval between two samples of the GPUs, seconds."""

    dcgm_names: bool = False
    """Whether the metrics of GPUs have dcgm-exporter's names instead of Stoker's."""

    host_metrics: bool = True
    """Whether memory, load and disk are reported; not needed if node_exporter runs."""

    def __post_init__(self) -> None:
        if not self.every_s >= _SHORTEST_S:
            raise ConfigError(
                f"--interval must be at least {_SHORTEST_S} s",
                got=self.every_s,
                fix="Leave it out for one sample per second.",
            )


@contextlib.contextmanager
def running_exporter(config: ExporterConfig) -> Iterator[str]:
    """Sample the GPUs and answer scrapes inside the `with` block.

    Args:
        config: Settings of the exporter.

    Yields:
        Address on which the exporter listens, HOST:PORT.

    Raises:
        ConfigError: The port is in use, or a server's address is not HOST:PORT.
    """
    discovery = Discovery(config.runs, config.servers)
    with GpuSampler(every_s=config.every_s) as sampler:

        def metrics() -> str:
            gpus = sampler.dcgm_families() if config.dcgm_names else sampler.families()
            host = host_families(config.runs) if config.host_metrics else []
            return text_of([*gpus, *host])

        pages = {
            "/metrics": Page(content=metrics),
            "/sd": Page(content=discovery.content, content_type="application/json"),
        }
        with ScrapeServer(pages, port=config.port, host=config.host) as server:
            yield server.address
