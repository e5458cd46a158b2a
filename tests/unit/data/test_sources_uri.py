"""What a URI in `data.source` means, and that no secret in it is shown."""

from __future__ import annotations

import pytest

from stoker.core.errors import ConfigError
from stoker.data.sources.config import IngestConfig
from stoker.data.sources.uri import is_uri, parse_uri


@pytest.mark.parametrize(
    ("source", "bucket", "key", "options"),
    [
        ("s3://bucket/a/b.csv", "bucket", "a/b.csv", {}),
        ("gs://bucket", "bucket", "", {}),
        ("s3://bucket/a/", "bucket", "a", {}),
        ("S3://bucket/a b%20c#d@e.csv", "bucket", "a b%20c#d@e.csv", {}),
        ("s3://bucket/part-?.csv", "bucket", "part-?.csv", {}),
        ("s3://bucket/year=20?4/*.csv", "bucket", "year=20?4/*.csv", {}),
        ("s3://bucket/a?region=eu-west-1", "bucket", "a", {"region": "eu-west-1"}),
        ("gs://bucket?anonymous=true", "bucket", "", {"anonymous": "true"}),
        (
            "s3://bucket/p?.csv?scheme=http&endpoint_override=127.0.0.1:9000",
            "bucket",
            "p?.csv",
            {"scheme": "http", "endpoint_override": "127.0.0.1:9000"},
        ),
    ],
)
def test_a_uri_is_taken_as_it_is_written(
    source: str, bucket: str, key: str, options: dict[str, str]
) -> None:
    uri = parse_uri(source)

    assert (uri.bucket, uri.key, uri.options) == (bucket, key, options)
    assert IngestConfig(source=source).source == source


@pytest.mark.parametrize("path", ["data/a.csv", "/a/b.csv", "a:b.csv", "c://x"])
def test_a_path_is_not_a_uri(path: str) -> None:
    assert not is_uri(path)


@pytest.mark.parametrize(
    "source",
    [
        "s3://AKIAUSER:hunter2@bucket/a.csv",
        "s3://AKIAUSER:hun/ter2@bucket/a.csv",
        "gs://hunter2@bucket/a.csv",
        "s3://bucket/a.csv?secret_key=hunter2",
        "s3://bucket/a.csv?region=eu&session_token=hunter2",
        "s3://bucket/a.csv?endpoint_override=u:hunter2@host:9000",
        "hdfs://u:hunter2@host/a.csv",
        "http://host/a.csv?sig=hunter2",
    ],
)
def test_a_uri_with_a_secret_is_refused_and_the_secret_is_not_shown(source: str) -> None:
    with pytest.raises(ConfigError, match=r"data\.source") as refused:
        IngestConfig(source=source)

    assert "hunter2" not in str(refused.value)
    assert "ter2" not in str(refused.value)


def test_a_uri_cannot_be_prepared() -> None:
    with pytest.raises(ConfigError, match=r"data\.prepare"):
        IngestConfig(source="s3://bucket/a.csv", prepare="model:prepare")


@pytest.mark.parametrize(
    "options", [{"cache_bytes": 0}, {"store_attempts": 0}, {"store_backoff_s": -1.0}]
)
def test_a_bound_that_cannot_be_one_is_refused(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="must be at least"):
        IngestConfig(source="s3://bucket/a.csv", **options)  # type: ignore[arg-type]  # mypy cannot check **
