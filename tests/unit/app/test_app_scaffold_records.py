"""`stoker init` from files whose records name their own values."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import yaml

from stoker.scaffold import default_name, write_experiment


def test_init_takes_a_tfrecord_file(tmp_path: Path, sample_data: Path) -> None:
    source = sample_data / "mnist.tfrecord"

    made = write_experiment(tmp_path / "mnist", str(source))

    assert (made.label, made.task) == ("image_class", "multiclass")
    settings = yaml.safe_load((tmp_path / "mnist" / "stoker.yaml").read_text())
    assert (settings["name"], settings["data"]["source"]) == ("mnist", str(source))
    code = (tmp_path / "mnist" / "model.py").read_text()
    assert 'NUMBERS = ["image_floats"]' in code
    ast.parse(code)


def test_init_takes_json_lines(tmp_path: Path) -> None:
    source = tmp_path / "clicks.jsonl"
    rows = [{"age": index, "color": "red", "label": "yn"[index % 2]} for index in range(40)]
    source.write_text("\n".join(map(json.dumps, rows)))

    made = write_experiment(tmp_path / "clicks", str(source))

    assert (made.label, made.task) == ("label", "binary")
    assert default_name(str(tmp_path / "clicks.jsonl.gz")) == "clicks"
    assert default_name(str(tmp_path / "clicks.tfrecord.gz")) == "clicks"
