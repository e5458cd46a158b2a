"""Ingest: convert a source's records to shards, and write their manifest."""

from stoker.data.ingest.describe import ColumnDescription, SourceDescription, describe_source
from stoker.data.ingest.run import Consumer, ingest
from stoker.data.sources.config import REACH_KEYS, ImagesConfig, IngestConfig, ServiceConfig
from stoker.data.sources.records import Progress, silent
from stoker.data.sources.source import fingerprint_of, list_source, source_fingerprint

__all__ = [
    "REACH_KEYS",
    "ColumnDescription",
    "Consumer",
    "ImagesConfig",
    "IngestConfig",
    "Progress",
    "ServiceConfig",
    "SourceDescription",
    "describe_source",
    "fingerprint_of",
    "ingest",
    "list_source",
    "silent",
    "source_fingerprint",
]
