"""Write docs/reference: configuration.md and targets.md from dataclasses, metrics.md from the catalogue of metrics.

--check says whether both are current.
"""

import ast
import dataclasses
import importlib
import inspect
import sys
import textwrap
import typing
from pathlib import Path

from stoker.app.experiment import Experiment, PushSection, ServeSection
from stoker.cluster.resources import Resources
from stoker.data.feed.config import FeedConfig
from stoker.data.feed.images.augment import AugmentConfig, ColorJitter, RandomResizedCrop
from stoker.data.ingest import ImagesConfig, IngestConfig, ServiceConfig
from stoker.data.user_dataset.config import OwnDatasetConfig, PipelineConfig
from stoker.evaluate.config import EvaluateConfig, Gate, SliceGate
from stoker.jobs.targets import provider_names
from stoker.monitor.settings import ModelSlo, Slo
from stoker.rollout.state.settings import RolloutSettings
from stoker.rollout.state.user_gates import UserGate
from stoker.rollout.state.webhook import Webhook
from stoker.telemetry.catalogue.all import METRICS
from stoker.telemetry.catalogue.metric import Metric, Writer
from stoker.train.config import CheckpointConfig, MemoryConfig, TensorBoardConfig, TrainConfig
from stoker.train.elastic import ElasticConfig
from stoker.train.health.divergence import DivergenceConfig

REFERENCE = Path(__file__).parent / "reference"
SECTIONS: list[tuple[str, type]] = [
    ("stoker.yaml", Experiment),
    ("data", IngestConfig),
    ("data.images", ImagesConfig),
    ("data.service", ServiceConfig),
    ("data, a dataset of your own", OwnDatasetConfig),
    ("data.pipeline", PipelineConfig),
    ("train", TrainConfig),
    ("train.feed", FeedConfig),
    ("train.augment", AugmentConfig),
    ("train.augment.random_resized_crop", RandomResizedCrop),
    ("train.augment.color_jitter", ColorJitter),
    ("train.checkpoint", CheckpointConfig),
    ("train.elastic", ElasticConfig),
    ("train.divergence", DivergenceConfig),
    ("train.memory", MemoryConfig),
    ("train.tensorboard", TensorBoardConfig),
    ("evaluate", EvaluateConfig),
    ("evaluate.gates.METRIC", Gate),
    ("evaluate.slice_gates.METRIC", SliceGate),
    ("push", PushSection),
    ("push.settings", RolloutSettings),
    ("push.settings.user_gates, each", UserGate),
    ("push.settings.webhooks, each", Webhook),
    ("serve", ServeSection),
    ("slo", Slo),
    ("slo.models.NAME", ModelSlo),
    ("resources", Resources),
]


def field_texts(cls: type) -> dict[str, tuple[str, str]]:
    """Field -> (its type as written, the string under it)."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(tree, ast.ClassDef)
    texts = {}
    for here, below in zip(tree.body, tree.body[1:], strict=False):
        is_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
        if isinstance(here, ast.AnnAssign) and isinstance(here.target, ast.Name) and is_text:
            text = " ".join(str(typing.cast(ast.Constant, below.value).value).split())  # type: ignore[attr-defined]
            texts[here.target.id] = (ast.unparse(here.annotation), text)
    return texts


def default_text(field: dataclasses.Field[object]) -> str:
    """The default as YAML would write it, or `required`."""
    if field.default is not dataclasses.MISSING:
        return f"`{field.default}`" if field.default is not None else "none"
    if field.default_factory is dataclasses.MISSING:
        return "required"
    made = field.default_factory()
    if dataclasses.is_dataclass(made):
        return "see below"
    return f"`{made}`" if isinstance(made, dict) and made else "none"


def configuration() -> str:
    """The page of `stoker.yaml`."""
    lines = [
        "# stoker.yaml",
        "",
        "Made by `docs/make_reference.py` from the dataclasses that read it. An unknown key, a wrong",
        "type or a broken rule is one line of error with file, line and key. Paths are relative to the file.",
    ]
    for title, cls in SECTIONS:
        lines += settings_table(title, cls)
    return "\n".join(lines) + "\n"


def settings_table(title: str, cls: type) -> list[str]:
    """The lines of one section."""
    lines = ["", f"## {title}", "", "| key | type | default | meaning |", "|---|---|---|---|"]
    texts = field_texts(cls)
    for field in dataclasses.fields(cls):
        if field.name == "folder":
            continue
        kind, text = texts[field.name]
        lines.append(row(f"`{field.name}`", f"`{kind}`", default_text(field), text))
    return lines


def targets() -> str:
    """The page of the targets of jobs."""
    lines = [
        "# targets.yaml",
        "",
        "Made by `docs/make_reference.py` from the dataclasses that read it. `~/.config/stoker/targets.yaml`",
        "(`$XDG_CONFIG_HOME/stoker/targets.yaml`) has a section for each target; its name is what `stoker submit --on NAME`",
        "takes. `targets` in `stoker.yaml` has the same sections and takes precedence, name by name. A target named `local`",
        "with `provider: local` always exists. An unknown key or a wrong value is one line of error with file, line and key.",
        "",
        "```yaml",
        "desk: {provider: local, max_restarts: 5}",
        "```",
        "",
        "Every target has `provider`, the kind of target; the other keys depend on it.",
    ]
    for name in provider_names():
        kind = importlib.import_module(f"stoker.jobs.providers.{name}.kind").KIND
        lines += settings_table(f"provider: {name}", kind.settings)
    return "\n".join(lines) + "\n"


def row(*cells: str) -> str:
    """One line of a table."""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


WRITERS = {
    Writer.TRAINING: "Training",
    Writer.SERVER: "Server",
    Writer.ROLLOUT: "Rollout",
    Writer.EXPORTER: "GPUs and hosts",
}
"""What writes metrics -> the title of its section."""


def metrics() -> str:
    """The page of the metrics."""
    lines = [
        "# Metrics",
        "",
        "Made by `docs/make_reference.py` from `stoker.telemetry.catalogue`, which the code writes through. Names are",
        "as Prometheus stores them; a histogram has the series `_bucket`, `_sum` and `_count`. Units are base units except",
        "in TensorFlow Serving's metrics and those next to them. A metric that TensorBoard and `metrics.jsonl` have too",
        "has the name that it has there in the last column.",
    ]
    for writer, title in WRITERS.items():
        listed = [metric for metric in METRICS if metric.writer is writer]
        if not listed:
            continue
        lines += [
            "",
            f"## {title}",
            "",
            row("name", "kind", "unit", "labels", "meaning", "TensorBoard"),
        ]
        lines += ["|---|---|---|---|---|---|", *map(metric_row, listed)]
    return "\n".join(lines) + "\n"


def metric_row(metric: Metric) -> str:
    """The line of one metric."""
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    board = f"`{metric.tensorboard}`" if metric.tensorboard else ""
    return row(f"`{metric.name}`", metric.kind, metric.unit, labels, metric.help, board)


PAGES = {"configuration.md": configuration, "metrics.md": metrics, "targets.md": targets}
"""File of the reference -> what makes it."""


def main() -> int:
    """Write the pages, or with --check compare them."""
    outdated = []
    for name, make in PAGES.items():
        path, text = REFERENCE / name, make()
        if "--check" not in sys.argv:
            path.write_text(text, encoding="utf-8")
        elif not path.is_file() or path.read_text(encoding="utf-8") != text:
            outdated.append(name)
    if "--check" in sys.argv:
        print(
            f"docs: out of date: {', '.join(outdated)}"
            if outdated
            else "docs: the reference is current"
        )
    return 1 if outdated else 0


if __name__ == "__main__":
    sys.exit(main())
