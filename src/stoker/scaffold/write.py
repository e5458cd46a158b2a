"""Writes the two files of an experiment: `stoker.yaml` and `model.py`."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

from stoker.core.config import dns_name
from stoker.core.errors import ConfigError, DataError, Plain, UserError
from stoker.core.files import write_atomic
from stoker.data.ingest import IngestConfig, SourceDescription, describe_source
from stoker.data.sources.columns.table import UnusableColumn
from stoker.data.sources.config import ColumnsConfig
from stoker.data.sources.uri import is_uri, parse_uri
from stoker.data.sources.written_numbers import NumberText
from stoker.scaffold.model import image_model, table_model
from stoker.scaffold.source_facts import Label, TaskKind, find_label, read_settings
from stoker.scaffold.spelling import fill, python_text, yaml_flow

EXAMPLES_SEEN = 300_000
"""Number of rows times epochs of a training on a table: it takes about a minute on two cores."""

IMAGES_SEEN = 60_000
"""Number of images times epochs of a training on images: an image costs about a hundred times as much as a row."""

MIN_ROWS = 2
"""Minimum number of records: with a single record, no column varies, so none can be the label."""

MAX_DROP = 0.02
"""The gate `max_drop` in a new `stoker.yaml`: the metric varies by about this much if the same model is trained
again on a few hundred rows."""

METRICS: dict[TaskKind, tuple[str, ...]] = {
    "binary": ("auc", "accuracy"),
    "multiclass": ("accuracy", "macro_f1"),
    "regression": ("r2", "rmse", "mae"),
}
"""Task -> its metrics; the gate limits the first one. For a regression this is r2, which, unlike rmse, does not
depend on the label's unit."""

_IMAGE, _FOLDER_NAME = "image", "label"
"""Names of the two columns of a folder of images with one sub-folder per class."""

_ENDINGS = re.compile(
    r"(\.(csv|tsv|txt|jsonl|ndjson|gz|parquet|pq|tfrecords?|tfrec))+$", re.IGNORECASE
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Source:
    """A source, how to read it, and its description."""

    config: IngestConfig
    """The settings with which to read the source."""

    description: SourceDescription
    """Columns and rows of the source, without columns that cannot be used."""

    notes: list[str]
    """A line for each column that is left out or whose type was assumed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scaffolded:
    """The files that `stoker init` wrote, and its decisions."""

    files: tuple[Path, ...]
    """Paths of the files, `stoker.yaml` first."""

    label: str
    """The column that the model predicts."""

    task: TaskKind
    """Kind of the model's answer."""

    note: str
    """One line: the label, why it was chosen, its kind, and how to choose another."""


def default_name(source: Path | str) -> str:
    """Return the default name of an experiment on some data, valid as a host name, in URLs and as a folder."""
    located = _located(source)
    uri = parse_uri(located) if is_uri(located) else None
    path = Path(located) if uri is None else Path("/", uri.bucket, uri.key)
    return dns_name(_ENDINGS.sub("", path.name), *(parent.name for parent in path.parents))


def write_experiment(
    folder: Path, source: Path | str, *, label: str | None = None, name: str | None = None
) -> Scaffolded:
    """Write a `stoker.yaml` and a `model.py` that run as they are.

    Args:
        folder: The folder for both files; created if it does not exist.
        source: A table or TFRecord file, a folder or glob of them, or a folder of images by class; a
            path or a URI.
        label: The column to predict; guessed by default.
        name: The experiment's name (default: from the source); converted to a valid host name.

    Raises:
        UserError: one of the files exists already.
        ConfigError: the label does not exist or is unusable, or no other column is usable.
        DataError: the source cannot be read.
    """
    files = (folder / "stoker.yaml", folder / "model.py")
    _require_free(folder, files)
    _require_outside(folder, source)
    described = _describe(read_settings(_located(source)), label)
    seen = described.description
    _require_rows(seen, source)
    images = seen.format == "images"
    found = _folder_label(seen, label) if images else find_label(seen, described.config, label)
    code = image_model(_IMAGE, found) if images else table_model(seen, found)
    note = " ".join([_note(found, seen), *described.notes])
    settings = _settings(
        found,
        described,
        name=dns_name(name, default_name(source)) if name else default_name(source),
        path=_path_from(folder, source),
        preprocessing="def preprocessing_fn" in code,
        note=note,
    )
    write_atomic(files[1], code)
    write_atomic(files[0], settings)  # last: it makes the folder an experiment
    return Scaffolded(files=files, label=found.name, task=found.task, note=note)


def _describe(config: IngestConfig, label: str | None) -> _Source:
    """Describe a source without its unusable columns."""
    notes: list[str] = []
    unusable: UnusableColumn | None = None
    while True:
        try:
            seen = describe_source(config)
        except UnusableColumn as error:
            if error.column == label:
                raise
            unusable = error
            notes.append(f"Column {error.column!r} is left out: {error.got}.")
            columns = ColumnsConfig(exclude=(*config.columns.exclude, error.column))
            config = replace(config, columns=columns)
            continue
        except ConfigError:
            if unusable is None:
                raise
            raise unusable from None  # no column is left: report why the last one is unusable
        written = {each.column: each.number for each in seen.assumptions if each.number}
        if not written:
            notes += [f"{each.text}." for each in seen.assumptions]
            return _Source(config=config, description=seen, notes=notes)
        notes += [
            f"Column {name!r} is read as numbers such as {number}."
            for name, number in written.items()
        ]
        numbers = {name: NumberText(number=number) for name, number in written.items()}
        config = replace(config, types=config.types | numbers)


def _require_rows(seen: SourceDescription, source: Path | str) -> None:
    """Raise an error for too few readable records."""
    if not seen.rows and seen.bad:
        raise DataError(
            f"{source} must hold at least one record that can be read",
            got=Plain(f"{seen.bad} records, all unreadable"),
            fix="Save it as UTF-8 text with a header, numbers within 64 bits.",
        )
    if seen.rows < MIN_ROWS:
        raise DataError(
            f"{source} must hold at least {MIN_ROWS} records",
            got=Plain(f"{len(seen.columns)} columns and {'one' if seen.rows else 'no'} record"),
            fix="Check that the file is the right one and complete.",
        )


def _require_free(folder: Path, files: tuple[Path, ...]) -> None:
    if folder.exists() and not folder.is_dir():
        raise UserError(
            "stoker init must be given a folder", got=str(folder), fix="Give another path."
        )
    for path in files:
        if os.path.lexists(path):
            raise UserError(
                "stoker init does not overwrite files: the file must not exist yet",
                got=str(path),
                fix="Give another folder, or move the file away.",
            )


def _require_outside(folder: Path, source: Path | str) -> None:
    located = _located(source)
    data = Path(located).resolve()
    if not is_uri(located) and data.is_dir() and folder.resolve().is_relative_to(data):
        raise UserError(
            f"the experiment must not be inside its data {source}: its files would be read as data",
            got=str(folder),
            fix="Give a folder outside the data as the second argument, e.g. `experiment`.",
        )


def _folder_label(seen: SourceDescription, wanted: str | None) -> Label:
    if wanted not in (None, _FOLDER_NAME):
        raise ConfigError(
            f"the label of an image folder is {_FOLDER_NAME!r}, the name of the sub-folder",
            got=wanted,
            fix="Remove --label.",
        )
    if len(seen.classes) < 2:
        raise ConfigError(
            "a folder of images must have one sub-folder for each of at least two classes",
            got=sorted(seen.classes),
            fix="Sort the images into sub-folders named by their class.",
        )
    count = len(seen.classes)
    return Label(
        name=_FOLDER_NAME,
        task="binary" if count == 2 else "multiclass",
        why="the name of the sub-folder",
        form="text",
        classes=count,
    )


def _note(label: Label, seen: SourceDescription) -> str:
    kind = f"{label.classes} classes" if label.classes else "a number"
    choose = "" if seen.format == "images" else " Choose another with --label COLUMN."
    lacking = f" {label.missing:,} rows have no label and are left out." if label.missing else ""
    records = "1 record" if seen.bad == 1 else f"{seen.bad:,} records"
    bad = f" {records} cannot be read: `stoker run` says why." if seen.bad else ""
    return (
        f"The label is {python_text(label.name)} ({label.why}): {kind}, {seen.rows:,} rows."
        f"{choose}{lacking}{bad}"
    )


def _settings(
    label: Label, source: _Source, *, name: str, path: str, preprocessing: bool, note: str
) -> str:
    metrics = METRICS[label.task]
    function = "preprocessing: model:preprocessing_fn  # raw columns -> features\n"
    return fill(
        "stoker.yaml",
        name=yaml_flow(name),
        source=yaml_flow(path),
        data_options=_data_options(label, source),
        preprocessing=function if preprocessing else "",
        label_note=note,
        label=yaml_flow(label.name),
        epochs=_epochs(source.description),
        metrics=", ".join(metrics),
        main_metric=metrics[0],
        max_drop=MAX_DROP,
    )


def _data_options(label: Label, source: _Source) -> str:
    config, seen = source.config, source.description
    lines = []
    if config.delimiter != ",":
        lines.append(f"delimiter: {yaml_flow(config.delimiter)}")
    if config.images.size is not None:
        size = list(config.images.size)
        lines.append(f"images: {{size: {size}}}  # height, width to which all are resized")
    numbers = {name: f"{{number: {yaml_flow(each.number)}}}" for name, each in _written(config)}
    types = {yaml_flow(name): spelled for name, spelled in numbers.items()}
    if label.form == "as text":
        types[yaml_flow(label.name)] = "string"
    if types:
        why = "  # its numbers are class names" if label.form == "as text" else ""
        spelled = ", ".join(f"{name}: {how}" for name, how in types.items())
        lines.append(f"types: {{{spelled}}}{why}")
    if label.missing:
        lines.append(f"max_bad_rows: {label.missing}  # rows without a label")
    left_out = ", ".join(map(yaml_flow, config.columns.exclude))
    ragged = (each.column.name for each in seen.columns if each.column.is_ragged)
    lists = ", ".join(map(yaml_flow, ragged))
    parts = [
        f"{key}: [{names}]" for key, names in (("exclude", left_out), ("lists", lists)) if names
    ]
    if parts:
        why = "  # those excluded cannot be used" if left_out else "  # of varying length"
        lines.append(f"columns: {{{', '.join(parts)}}}{why}")
    if seen.bad:
        total = seen.bad + label.missing
        lines.append(f"# max_bad_rows: {total}  # also leaves out what cannot be read")
    return "".join(f"  {line}\n" for line in lines)


def _written(config: IngestConfig) -> list[tuple[str, NumberText]]:
    return [(name, how) for name, how in config.types.items() if isinstance(how, NumberText)]


def _epochs(seen: SourceDescription) -> int:
    aim = IMAGES_SEEN if seen.format == "images" else EXAMPLES_SEEN
    return max(5, min(100, aim // max(seen.rows, 1)))


def _path_from(folder: Path, source: Path | str) -> str:
    """Return the source's path; relative if it is in the experiment's folder, so that both can be moved together."""
    located = _located(source)
    if is_uri(located):
        return located
    data, home = Path(located), folder.absolute()
    return str(data.relative_to(home)) if data.is_relative_to(home) else str(data)


def _located(source: Path | str) -> str:
    """Return the source as a URI or an absolute path."""
    return str(source) if is_uri(str(source)) else str(Path(source).absolute())
