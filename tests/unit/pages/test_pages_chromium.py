"""The six reports in a real Chromium: nothing wider than the page, and no word broken."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from html import escape, unescape
from pathlib import Path

import pytest
from tests.unit.evaluate.test_evaluate_evaluation import EVERY
from tests.unit.monitor.test_monitor_goodput import reports as runs_of_goodput
from tests.unit.scriptprofile.test_script_page import a_finding, a_loop, profile
from tests.unit.tune.test_tune_search import World, tuned

from stoker.core.statistics.columns import ColumnStatistics, NumberStatistics, ValueCount
from stoker.data.features.analysis.anomalies import Anomaly
from stoker.data.features.analysis.report import render_report
from stoker.data.features.analysis.statistics import Statistics, infer_schema
from stoker.evaluate.report import report_html
from stoker.monitor.goodput_page import goodput_page
from stoker.pages.html import page, section
from stoker.pages.table import Code, Number, Prose, facts, table
from stoker.scriptprofile.page import page_html
from stoker.tune.report import report

OUTCOME = Path(__file__).parents[3] / ".tools" / "chromium"
"""Written by `make test`: whether it installed chromium, or why not (`.ci/install_chromium`)."""

HOSTILE = ("<script>document.title='run'</script>", "n" * 300)

LOOK = r"""
const found = [];
for (const frame of document.querySelectorAll('iframe')) {
  const doc = frame.contentDocument, root = doc.documentElement;
  if (root.scrollWidth > root.clientWidth) found.push(`${frame.id}: ${root.scrollWidth} px wide`);
  const walker = doc.createTreeWalker(doc.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode;
    if (!node.parentElement.closest('td, th')) continue;
    for (const word of node.data.matchAll(/[\p{L}\p{N}]+/gu)) {
      const before = node.data.slice(0, word.index).match(/\S*$/)[0];
      const after = node.data.slice(word.index).match(/^\S*/)[0];
      if (before.length + after.length > 25) continue;
      const range = doc.createRange();
      range.setStart(node, word.index); range.setEnd(node, word.index + word[0].length);
      const lines = new Set([...range.getClientRects()].map(box => Math.round(box.top)));
      if (lines.size > 1) found.push(`${frame.id}: ${word[0]} is broken`);
    }
  }
}
document.body.innerHTML = '';
document.body.append(JSON.stringify(found));
"""


def data_report() -> str:
    """A column for each hostile name; of floats that occur once, and of one that occurs twice."""
    numbers = NumberStatistics(
        mean=1.0, std=1.0, min=0.0, max=2.0, zeros=0, infinite=0, quantiles=(), histogram=(1, 2)
    )
    columns = tuple(
        ColumnStatistics(
            name=name,
            dtype="float32",
            count=4,
            missing=0,
            distinct=3,
            numbers=numbers,
            lengths=None,
            top=(ValueCount(value="41.900001525878906", count=2), ValueCount(value="7.5", count=1)),
        )
        for name in HOSTILE
    )
    statistics = Statistics(fingerprint="f" * 64, rows={"train": 4}, splits={"train": columns})
    anomalies = [
        Anomaly(split="train", column=name, kind="x", severity="error", message=name)
        for name in HOSTILE
    ]
    return render_report(statistics, infer_schema(statistics), anomalies)


def reports(folder: Path) -> dict[str, str]:
    """One of each writer, and a table of every kind of column."""
    row = [
        *HOSTILE,
        "12,345 samples/s",
        "a sentence about precision",
        "evaluate.gates.auc.max_drop",
    ]
    kinds = table(["decision", "accuracy", Number("n"), Prose("why"), Code("set by")], [row])
    loop, finding = a_loop(), a_finding()
    return {
        "data": data_report(),
        **{f"evaluation {place}": report_html(each) for place, each in enumerate(EVERY)},
        "script": page_html(profile(loops=(loop,), findings=(finding,), minor=(finding,))),
        "tuning": report(tuned(World(), folder), name=HOSTILE[1], usd_per_hour=3.6),
        "goodput": goodput_page(runs_of_goodput(folder)),
        "profile": page(HOSTILE[0], [section("Figures", facts([HOSTILE]), kinds)]),
    }


def test_values_that_occur_once_are_not_most_frequent() -> None:
    text = data_report()

    assert "<div>41.9</div>" in text
    assert "7.5" not in text


def test_no_report_is_wider_than_its_window_and_no_word_in_a_table_breaks(tmp_path: Path) -> None:
    chromium = shutil.which("chromium")
    if chromium is None:
        outcome = OUTCOME.read_text().strip() if OUTCOME.is_file() else "make test installs it"
        if os.environ.get("CI") == "true" and outcome == "installed":
            pytest.fail("`make test` installed chromium, but it is not on the PATH")
        pytest.skip(f"no chromium: {outcome}")
    frames = [
        f'<iframe id="{name}, {width}" style="width:{width}px" srcdoc="{escape(text)}"></iframe>'
        for name, text in reports(tmp_path).items()
        for width in (420, 1200)
    ]
    whole = tmp_path / "frames.html"
    script = f"<script>onload = () => {{{LOOK}}}</script>"
    whole.write_text(f'<!doctype html><meta charset="utf-8">{script}{"".join(frames)}')

    done = subprocess.run(
        [
            chromium,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--dump-dom",
            f"--user-data-dir={tmp_path / 'user'}",
            whole.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )

    seen = re.search(r"<body>(.*)</body>", done.stdout, re.DOTALL)
    assert seen is not None, done.stderr
    assert json.loads(unescape(seen[1])) == []
    assert "<title>run" not in done.stdout
