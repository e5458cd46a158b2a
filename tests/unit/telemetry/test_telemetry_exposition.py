"""The text format of Prometheus, read back by its own tool and by its Python client."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from stoker.telemetry.catalogue import dcgm, gpu, host
from stoker.telemetry.catalogue.metric import Kind, Metric, Writer
from stoker.telemetry.exposition import family, text_of

METRIC = Metric(
    name="stoker_example_total",
    kind=Kind.COUNTER,
    unit="",
    help='A "help" with \\ and\na second line.',
    writer=Writer.TRAINING,
    labels=("run", "name"),
)

UNPACKED = Path(__file__).parents[3] / ".tools" / "prometheus" / "usr" / "bin"
"""Where `make test` unpacks Debian's prometheus."""

Samples = dict[Sequence[str], float]

HOSTILE = (
    'quote " quote',
    "back \\ slash",
    "ends with \\",
    "line\nfeed",
    "\\n no line feed",
    "return\r",
    "tab\t",
    "{a=\"b\",c='d'} 1 # HELP",
    "",
    "ü 漢 \U0001f600 \u2028",
    "nul\0inside",
    "x" * 100_000,
)


def read_back(text: str) -> Samples:
    (found,) = text_string_to_metric_families(text)
    return {
        tuple(each.labels[name] for name in METRIC.labels): each.value for each in found.samples
    }


def accepted(text: str) -> subprocess.CompletedProcess[str]:
    promtool = shutil.which("promtool", path=f"{os.environ.get('PATH', '')}:{UNPACKED}")
    if promtool is None:
        pytest.skip("no promtool: apt-get install prometheus")
    return subprocess.run(
        [promtool, "check", "metrics"],
        input=text.encode(errors="replace").decode(),
        capture_output=True,
        text=True,
        check=False,
    )


def test_hostile_names_come_back_as_they_were() -> None:
    given_samples: Samples = {
        (text, str(place)): float(place) for place, text in enumerate(HOSTILE)
    }

    assert read_back(text_of([family(METRIC, given_samples)])) == given_samples


@given(st.text(st.characters(codec="utf-8"), max_size=40))
def test_any_text_is_a_label(value: str) -> None:
    assert read_back(text_of([family(METRIC, {(value, "x"): 1.5})])) == {(value, "x"): 1.5}


def test_promtool_accepts_hostile_names_and_says_what_is_wrong_with_bad_text() -> None:
    samples: Samples = {(text, str(place)): 1.0 for place, text in enumerate(HOSTILE)}
    text = text_of([family(METRIC, samples)])

    assert accepted(text).returncode == 0, accepted(text).stderr
    assert accepted(text.replace("\\n", "\n")).returncode != 0


def test_numbers_that_are_none_are_written_as_prometheus_reads_them() -> None:
    samples: Samples = {("a", "nan"): math.nan, ("a", "inf"): math.inf, ("a", "big"): 2.0**53 - 1}
    text = text_of([family(METRIC, samples)])

    found = read_back(text)
    assert math.isnan(found["a", "nan"])
    assert (found["a", "inf"], found["a", "big"]) == (math.inf, 2**53 - 1)
    assert accepted(text).returncode == 0


def test_a_metric_without_a_sample_is_absent_and_a_wrong_number_of_labels_is_a_bug() -> None:
    assert text_of([family(METRIC, {})]) == ""
    with pytest.raises(ValueError, match="zip"):
        family(METRIC, {("only one",): 1.0})


def test_names_of_gpus_and_hosts_follow_the_conventions_of_prometheus() -> None:
    own = [*gpu.STOKER, *host.METRICS]
    text = text_of(family(metric, {("x",) * len(metric.labels): 1.0}) for metric in own)

    done = accepted(text)

    assert (done.returncode, done.stderr) == (0, "")
    names = [metric.name for metric in [*gpu.METRICS, *host.METRICS]]
    assert len(set(names)) == len(names)
    assert set(dcgm.METRICS) <= set(gpu.METRICS)
    assert all(metric.help.endswith(".") for metric in [*gpu.METRICS, *host.METRICS])
