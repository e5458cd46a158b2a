"""Records -> shards and their manifest."""

from stoker.data.ingest.describe import ColumnDescription, SourceDescription, describe_source
from stoker.data.ingest.run import ingest, source_files, source_fingerprint
from stoker.data.sources.config import REACH_KEYS, ImagesConfig, IngestConfig, ServiceConfig
from stoker.data.sources.records import Progress, silent

__all__ = [
    "REACH_KEYS",
    "ColumnDescription",
    "ImagesConfig",
    "IngestConfig",
    "Progress",
    "ServiceConfig",
    "SourceDescription",
    "describe_source",
    "ingest",
    "silent",
    "source_files",
    "source_fingerprint",
]
