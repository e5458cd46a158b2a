"""The dashboard of GPUs: a node, or the fleet, by its variable."""

from __future__ import annotations

from dashboard_parts import Dashboard, Panel, Query, Row, Variable

_GPU = 'instance=~"$node",gpu=~"$gpu"'
_NAME = "{{instance}} GPU {{gpu}}"


def _of(expr: str, legend: str = _NAME) -> tuple[Query, ...]:
    return (Query(expr=expr, legend=legend),)


GPUS = Dashboard(
    uid="stoker-gpus",
    title="Stoker: GPUs",
    help="Utilization, users and health of the GPUs, of one node or of the fleet.",
    variables=(
        Variable(
            name="node",
            label="Node",
            query="label_values(stoker_gpu_memory_bytes, instance)",
        ),
        Variable(
            name="gpu",
            label="GPU",
            query='label_values(stoker_gpu_memory_bytes{instance=~"$node"}, gpu)',
        ),
    ),
    rows=(
        Row(
            title="Fleet",
            stats=(
                Panel(
                    title="GPUs",
                    queries=_of(f"count(stoker_gpu_memory_bytes{{{_GPU}}})", "GPUs"),
                    unit="short",
                    help="With MIG: instances.",
                ),
                Panel(
                    title="Active",
                    queries=_of(f"avg(gpu:stoker_gpu_active:ratio_avg5m{{{_GPU}}})", "mean"),
                    unit="percentunit",
                    alert="StokerGpuIdle",
                    help="Mean activity of the SMs; without GPM, the share of time in which some kernel ran.",
                ),
                Panel(
                    title="Memory used",
                    queries=_of(
                        f"sum(stoker_gpu_memory_used_bytes{{{_GPU}}}) / sum(stoker_gpu_memory_bytes{{{_GPU}}})",
                        "used",
                    ),
                    unit="percentunit",
                    limit=0.97,
                    alert="StokerGpuMemoryNearlyFull",
                    help="Of all chosen GPUs.",
                ),
                Panel(
                    title="Hottest",
                    queries=_of(f"max(stoker_gpu_temperature_celsius{{{_GPU}}})", "hottest"),
                    unit="celsius",
                    limit=87.0,
                    alert="StokerGpuHot",
                    help="Of all chosen GPUs.",
                ),
                Panel(
                    title="Power",
                    queries=_of(f"sum(stoker_gpu_power_watts{{{_GPU}}})", "power"),
                    unit="watt",
                    help="Of all chosen GPUs.",
                ),
                Panel(
                    title="Lost",
                    queries=_of(f"sum(stoker_gpu_lost{{{_GPU}}})", "lost"),
                    unit="short",
                    limit=1.0,
                    alert="StokerGpuLost",
                    help="Cards that fell off the bus.",
                ),
            ),
        ),
        Row(
            title="Work",
            lines=(
                Panel(
                    title="SMs active",
                    queries=_of(f"stoker_gpu_sm_active_ratio{{{_GPU}}}"),
                    unit="percentunit",
                    most=1.0,
                    alert="StokerGpuIdle",
                    help="Hopper and newer.",
                ),
                Panel(
                    title="Some kernel ran",
                    queries=_of(f"stoker_gpu_kernel_ran_ratio{{{_GPU}}}"),
                    unit="percentunit",
                    most=1.0,
                    help="NVML's utilization: one small kernel counts as much as one that fills the card.",
                ),
                Panel(
                    title="Tensor cores and memory bandwidth",
                    queries=(
                        Query(
                            expr=f"stoker_gpu_tensor_active_ratio{{{_GPU}}}",
                            legend=f"{_NAME} tensor",
                        ),
                        Query(
                            expr=f"stoker_gpu_dram_active_ratio{{{_GPU}}}", legend=f"{_NAME} DRAM"
                        ),
                    ),
                    unit="percentunit",
                    most=1.0,
                    help="The one that is close to 100 % limits the model.",
                ),
                Panel(
                    title="Memory by run and model",
                    queries=_of(
                        'sum by (instance, gpu, run, model) (stoker_gpu_process_memory_bytes{instance=~"$node",gpu=~"$gpu"})',
                        "GPU {{gpu}} {{run}}{{model}}",
                    ),
                    unit="bytes",
                    help="Memory of processes; if run and model are empty, the program is not Stoker.",
                ),
                Panel(
                    title="Memory used",
                    queries=_of(f"gpu:stoker_gpu_memory_used:ratio{{{_GPU}}}"),
                    unit="percentunit",
                    limit=0.97,
                    most=1.0,
                    alert="StokerGpuMemoryNearlyFull",
                    help="Of each GPU.",
                ),
                Panel(
                    title="PCIe and NVLink",
                    queries=(
                        Query(
                            expr=f"stoker_gpu_pcie_bytes_per_second{{{_GPU}}}",
                            legend=f"{_NAME} PCIe {{{{direction}}}}",
                        ),
                        Query(
                            expr=f"stoker_gpu_nvlink_bytes_per_second{{{_GPU}}}",
                            legend=f"{_NAME} NVLink {{{{direction}}}}",
                        ),
                    ),
                    unit="Bps",
                    help="Sent (tx) and received (rx).",
                ),
            ),
        ),
        Row(
            title="Health",
            lines=(
                Panel(
                    title="Temperature",
                    queries=_of(f"stoker_gpu_temperature_celsius{{{_GPU}}}"),
                    unit="celsius",
                    limit=87.0,
                    alert="StokerGpuHot",
                    help="Of the die.",
                ),
                Panel(
                    title="Power by its limit",
                    queries=_of(f"gpu:stoker_gpu_power_limit:ratio{{{_GPU}}}"),
                    unit="percentunit",
                    help="At 100 % the card lowers its clocks, which is normal at full load.",
                ),
                Panel(
                    title="Clocks",
                    queries=_of(f"stoker_gpu_clock_hertz{{{_GPU}}}", f"{_NAME} {{{{clock}}}}"),
                    unit="hertz",
                    help="Of the SMs and the memory.",
                ),
                Panel(
                    title="Slowed down",
                    queries=_of(
                        f"avg_over_time(stoker_gpu_throttled{{{_GPU}}}[5m])",
                        f"{_NAME} {{{{reason}}}}",
                    ),
                    unit="percentunit",
                    most=1.0,
                    alert="StokerGpuThrottled",
                    help="Share of the time, by reason.",
                ),
                Panel(
                    title="ECC errors in the last hour",
                    queries=_of(
                        f"increase(stoker_gpu_ecc_errors_total{{{_GPU}}}[1h])",
                        f"{_NAME} {{{{kind}}}}",
                    ),
                    unit="short",
                    alert="StokerGpuEccErrors",
                    help="A corrected one costs nothing; an uncorrected one lost data.",
                ),
                Panel(
                    title="Newest XID",
                    queries=_of(f"stoker_gpu_xid{{{_GPU}}}"),
                    unit="none",
                    help="Number of the driver's newest error; NVIDIA's list of XIDs explains it.",
                ),
                Panel(
                    title="Age of the exporter's newest sample",
                    queries=_of(
                        'stoker_exporter_last_sample_age_seconds{instance=~"$node"}', "{{instance}}"
                    ),
                    unit="s",
                    alert="StokerExporterWithoutData",
                    help="It grows while the driver does not respond.",
                ),
            ),
        ),
    ),
)
