"""What can be served, and what is refused before a port is opened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stoker.cli.serve.configuration import configured
from stoker.core.errors import ConfigError, UserError
from stoker.serve.config import ServeConfig, what_to_serve
from stoker.serve.errors import Code
from stoker.serve.observability.counters import Counter, Histogram
from stoker.telemetry.catalogue.metric import Kind, Metric, Writer


def test_a_folder_of_numbered_versions_is_one_model_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "taxi" / "0003").mkdir(parents=True)

    assert what_to_serve(tmp_path / "taxi").models == {"taxi": tmp_path / "taxi"}
    assert what_to_serve(tmp_path / "taxi", model_name="x").models == {"x": tmp_path / "taxi"}
    assert what_to_serve(tmp_path).root == tmp_path


def test_a_bare_savedmodel_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "saved_model.pb").write_bytes(b"")

    with pytest.raises(UserError, match="stoker push"):
        what_to_serve(tmp_path)
    with pytest.raises(UserError, match=r"must be a folder.*which does not exist"):
        what_to_serve(tmp_path / "nope")
    with pytest.raises(UserError, match=r"not object storage\. Received: gs://bucket"):
        what_to_serve(Path("gs://bucket/models"))


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"root": Path("a"), "models": {"a": Path("a")}},
        {"root": Path("a"), "rest_port": 65536},
        {"root": Path("a"), "grpc_port": -1},
        {"root": Path("a"), "poll_s": 0.0},
        {"root": Path("a"), "lame_duck_s": -1.0},
        {"models": {"../a": Path("a")}},
    ],
)
def test_a_setting_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        ServeConfig(**wrong)


def test_flags_become_the_configuration(tmp_path: Path) -> None:
    config = configured(tmp_path, model_name="taxi", host="::1", rest_port=1, grpc_port=2)

    assert config.models == {"taxi": tmp_path}
    assert (config.host, config.rest_port, config.grpc_port) == ("::1", 1, 2)
    with pytest.raises(ConfigError, match="one folder"):
        configured(None, model_name="taxi")
    with pytest.raises(ConfigError, match="one folder"):
        configured(tmp_path, model_name="taxi", both=True)


def test_every_code_has_tensorflow_servings_http_status() -> None:
    statuses = {code.name: code.http_status for code in Code}

    assert statuses == {
        "OK": 200,
        "CANCELLED": 499,
        "UNKNOWN": 500,
        "INVALID_ARGUMENT": 400,
        "DEADLINE_EXCEEDED": 504,
        "NOT_FOUND": 404,
        "ALREADY_EXISTS": 409,
        "PERMISSION_DENIED": 403,
        "RESOURCE_EXHAUSTED": 429,
        "FAILED_PRECONDITION": 400,
        "ABORTED": 409,
        "OUT_OF_RANGE": 400,
        "UNIMPLEMENTED": 501,
        "INTERNAL": 500,
        "UNAVAILABLE": 503,
        "DATA_LOSS": 500,
        "UNAUTHENTICATED": 401,
    }


def test_prometheus_reads_what_is_counted() -> None:
    from prometheus_client.parser import text_string_to_metric_families as parse

    about: Any = {"unit": "", "writer": Writer.SERVER}
    requests = Metric(
        name="requests", kind=Kind.COUNTER, labels=("model", "status"), help="How often.", **about
    )
    took = Metric(name="took", kind=Kind.HISTOGRAM, labels=("model",), help="How long.", **about)
    counter = Counter(requests)
    counter.add(model='a"\\\n', status="OK")
    counter.add(2, model='a"\\\n', status="OK")
    histogram = Histogram(took, bounds=(1.0, 10.0))
    for value in (0.5, 1.0, 5.0, 50.0):
        histogram.observe(value, model="a")
    text = "\n".join(["# TYPE requests counter", *counter.lines()])
    text += "\n".join(["", "# TYPE took histogram", *histogram.lines(), ""])

    samples = {
        (s.name, s.labels.get("le")): (s.labels["model"], s.value)
        for family in parse(text)
        for s in family.samples
    }

    assert samples == {  # the parser adds `_total` to a counter's name, as the library does
        ("requests_total", None): ('a"\\\n', 3),
        ("took_bucket", "1"): ("a", 2),
        ("took_bucket", "10"): ("a", 3),
        ("took_bucket", "+Inf"): ("a", 4),
        ("took_sum", None): ("a", 56.5),
        ("took_count", None): ("a", 4),
    }
