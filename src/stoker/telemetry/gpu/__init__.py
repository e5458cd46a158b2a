"""Samples GPUs through NVML, and writes the samples as metrics with Stoker's or dcgm-exporter's names."""
