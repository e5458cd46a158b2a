"""GPUs sampled through NVML, as metrics: Stoker's names and dcgm-exporter's."""
