"""The experiment: `stoker.yaml` and the user's modules as one object."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from stoker.cluster.resources import Resources
from stoker.core.config import build, located, names_key, read_yaml, with_overrides
from stoker.core.errors import ConfigError, Plain
from stoker.core.files import alone, scratch_folder, sweep
from stoker.core.fingerprint import fingerprint
from stoker.core.multi_output import by_output
from stoker.core.source_fingerprint import function_fingerprint, source_fingerprint
from stoker.core.user_code import call, load_function, split_reference
from stoker.data.ingest import IngestConfig
from stoker.data.ingest import source_fingerprint as data_source_fingerprint
from stoker.data.user_dataset.config import OwnDatasetConfig
from stoker.evaluate.config import EvaluateConfig, require_metrics_of
from stoker.monitor.settings import Slo
from stoker.registry.repository import checked_name
from stoker.rollout.state.settings import RolloutSettings
from stoker.train.config import TrainConfig

FILE = "stoker.yaml"
"""File that marks a folder as an experiment."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeSection:
    """The `serve` section."""

    model_name: str | None = None
    """Name of the model in the repository and in requests; the experiment's name by default."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PushSection:
    """The `push` section."""

    rollout: Literal["none", "canary"] = "none"
    """none: a pushed version takes all traffic immediately. canary: its traffic grows in stages, as with
    `stoker rollout start`; the first version of a model takes all traffic immediately."""

    settings: RolloutSettings = field(default_factory=RolloutSettings)
    """Settings of the rollout. The modules of Python gates are in the experiment folder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Experiment:
    """The settings of a chain from data to a served model, as in `stoker.yaml`."""

    name: str
    """Name of the runs: letters, digits, `_`, `-` and `.`."""

    data: IngestConfig | OwnDatasetConfig | str
    """Where the data is, and how it is read and split; or `module:function` that returns `tf.data.Dataset`s (a
    user-defined dataset), which is used without ingestion."""

    model: str
    """`module:function` that returns a compiled `keras.Model`."""

    label: str | dict[str, str] | None = None
    """A raw column, or an output of the preprocessing function; for a model with several outputs
    `{OUTPUT: NAME, ...}`. Required, except for a user-defined dataset, whose elements hold the label."""

    preprocessing: str | None = None
    """`module:function`, TensorFlow Transform's `preprocessing_fn(inputs)`; default: unchanged columns."""

    label_only: tuple[str, ...] = ()
    """Raw columns that requests to the served model do not have; a feature that needs one of them is an error."""

    train: TrainConfig = field(default_factory=TrainConfig)
    """How the model is trained."""

    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    """Metrics, slices and gates."""

    push: PushSection = field(default_factory=PushSection)
    """How a pushed version gets traffic."""

    serve: ServeSection = field(default_factory=ServeSection)
    """How the served model is called."""

    slo: Slo = field(default_factory=Slo)
    """Service level objectives of the model; `stoker monitor up` derives alerts from them."""

    resources: Resources = field(default_factory=Resources)
    """Resources of a cluster job; a run on this machine ignores them."""

    targets: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Targets of `stoker submit --on NAME`; they take precedence over `~/.config/stoker/targets.yaml`."""

    runs: Path = Path("runs")
    """Folder of the runs, relative to the experiment folder."""

    models: Path = Path("models")
    """The model repository, relative to the experiment folder."""

    folder: Path = Path()
    """The experiment folder, with the user's modules."""

    def __post_init__(self) -> None:
        if not self.name or self.name.startswith(".") or "/" in self.name or "\\" in self.name:
            raise ConfigError(
                "name must be a plain name without slashes", got=self.name, fix="E.g. taxi-tips."
            )
        if _STORE.match(str(self.runs)):
            raise ConfigError(
                "runs must be a folder in a file system, not in object storage, because a job counts its starts by creating files atomically",
                got=str(self.runs).replace(":/", "://", 1),
                fix="Name a folder of a shared file system or a volume; data.source may be in a bucket.",
            )
        split_reference(self.model, where="model")
        if self.preprocessing is not None:
            split_reference(self.preprocessing, where="preprocessing")
        if isinstance(self.data, str):
            object.__setattr__(self, "data", _own_dataset(self.data))
        if self.own_dataset is not None:
            self._check_own_dataset()
        else:
            self._check_files()
        checked_name(self.model_name, what="serve.model_name" if self.serve.model_name else "name")

    @property
    def labels(self) -> dict[str, str]:
        """Output of the model -> its label; empty for a user-defined dataset, whose elements hold the labels."""
        return {} if self.label is None else by_output(self.label)

    def _check_files(self) -> None:
        if self.files.prepare is not None:
            split_reference(self.files.prepare, where="data.prepare")
        if self.label is None:
            raise ConfigError(
                "label must be given",
                got=Plain("nothing"),
                fix="Add `label: ...` to stoker.yaml.",
            )
        if isinstance(self.label, dict) and len(self.label) < 2:
            raise ConfigError(
                "label must be a plain name if the model has one output",
                got=self.label,
                fix=f"Write `label: {next(iter(self.label.values()), '...')}`.",
            )
        require_metrics_of(self.evaluate, list(self.labels), any_label=True)

    def _check_own_dataset(self) -> None:
        what = "if data is a dataset of your own"
        for name in ("preprocessing", "label", "label_only"):
            if getattr(self, name):
                raise ConfigError(
                    f"{name} must be left out {what}, whose elements are features and label",
                    got=getattr(self, name),
                    fix="Let the dataset's function return finished features and labels, or use files (data.source).",
                )
        if self.train.batch_size != "auto":
            raise ConfigError(
                f"train.batch_size must be left out {what}, whose elements are batches",
                got=self.train.batch_size,
                fix="Batch the dataset in its function with `.batch(32)`, or set data.pipeline.batch_size.",
            )
        if self.train.sample_weight is not None:
            raise ConfigError(
                f"train.sample_weight must be left out {what}, whose elements may hold the weight",
                got=self.train.sample_weight,
                fix="Let the dataset's elements be (features, label, weight).",
            )
        if self.train.augment is not None:
            raise ConfigError(
                f"train.augment must be left out {what}",
                got=Plain("a section"),
                fix="Augment in a `map` call on the train dataset.",
            )

    @property
    def own_dataset(self) -> OwnDatasetConfig | None:
        """The section `data` if the dataset is user-defined, else None."""
        return self.data if isinstance(self.data, OwnDatasetConfig) else None

    @property
    def files(self) -> IngestConfig:
        """The section `data` if the data is in files.

        Raises:
            RuntimeError: the dataset is user-defined; check `own_dataset` first.
        """
        if not isinstance(self.data, IngestConfig):
            raise RuntimeError("an experiment with a user-defined dataset has no files")
        return self.data

    @property
    def model_name(self) -> str:
        """Name of the model in the repository and in requests."""
        return self.serve.model_name or self.name

    @property
    def runs_root(self) -> Path:
        """Folder of this experiment's runs."""
        return self.folder / self.runs / self.name

    @property
    def models_root(self) -> Path:
        """The model repository: `<root>/<model>/<version>/`."""
        return self.folder / self.models

    def code_fingerprint(self, reference: str) -> str:
        """Return the fingerprint of a user function and of everything in the folder that it may read."""
        module, function = reference.split(":")
        return function_fingerprint(self.folder, module, function, outputs=self.outputs)

    @property
    def outputs(self) -> tuple[Path, ...]:
        """Folders that Stoker writes."""
        return self.runs_root, self.models_root / self.model_name

    @property
    def unobserved(self) -> tuple[Path, ...]:
        """Paths whose reads by the user's code are not recorded: outputs, and the ingested source."""
        source = None if self.own_dataset else Path(self.files.source)
        inside = source is not None and self.folder in source.parents
        return (*self.outputs, source) if source is not None and inside else self.outputs

    def source_fingerprint(self, reference: str) -> str:
        """Return the fingerprint of a user function's source code only, for functions whose file reads are observed."""
        module, function = reference.split(":")
        return source_fingerprint(self.folder, module, function)[0]

    @property
    def followed_sources(self) -> frozenset[Path]:
        """Python files that the fingerprints of the user functions cover."""
        own = self.own_dataset
        named = [self.model, self.preprocessing, self.train.callbacks, own and own.dataset]
        files: frozenset[Path] = frozenset()
        for reference in named:
            if reference:
                files |= source_fingerprint(self.folder, *reference.split(":"))[1]
        return files

    def in_one_process(self) -> Experiment:
        """Return the experiment with a strategy for a single process."""
        if self.train.strategy not in ("multi_worker", "parameter_server"):
            return self
        return dataclasses.replace(self, train=dataclasses.replace(self.train, strategy="auto"))

    def to_json(self) -> dict[str, Any]:
        """Return all settings of a run as JSON values; `targets` is not among them."""
        settings = dataclasses.asdict(self)
        del settings["targets"]
        return _plain(settings)


def load_experiment(target: Path, *, overrides: Sequence[str] = ()) -> Experiment:
    """Read an experiment.

    Args:
        target: The folder with `stoker.yaml`, or the file itself.
        overrides: `dotted.key=value`. A path given here is relative to the current folder; a path in the file
            is relative to the file's folder.

    Raises:
        ConfigError: a setting is invalid.
    """
    file = target / FILE if target.is_dir() else target
    if not file.is_file():
        raise ConfigError(
            f"{target} must be a folder with a {FILE}",
            got=Plain(f"a folder without {FILE}" if target.is_dir() else "no such folder"),
            fix="`stoker init --from YOUR_DATA` writes one.",
        )
    folder = file.resolve().parent
    from_file = _paths_from(read_yaml(file), folder)
    given = _paths_from(with_overrides({}, overrides), Path.cwd())
    raw = _merged(_with_section(from_file, given), given)
    try:
        if "folder" in raw:
            raise ConfigError("folder is not set in stoker.yaml", got=raw["folder"])
        _check_service(raw.get("data"))
        _check_rollout(raw.get("push"))
        return build(Experiment, raw | {"folder": folder})
    except ConfigError as error:
        keys = {assignment.partition("=")[0].strip() for assignment in overrides}
        if any(names_key(error.rule, key) for key in keys):
            raise
        raise located(error, file) from None


def with_absolute_paths(overrides: Sequence[str]) -> list[str]:
    """Return `--set` assignments with absolute paths. If a key is set twice, only the last assignment is returned.

    Args:
        overrides: `dotted.key=value`; paths are relative to the current folder.
    """
    given = _paths_from(with_overrides({}, overrides), Path.cwd())
    paths = []
    for key in _PATH_KEYS:
        value: Any = given
        for part in key:
            value = value.get(part) if isinstance(value, dict) else None
        if isinstance(value, str):
            paths.append(f"{'.'.join(key)}={json.dumps(value)}")
    last: dict[str, str] = {}
    for each in (*overrides, *paths):
        name = ".".join(part.strip() for part in each.partition("=")[0].split("."))
        # to keep the order of assignments, because a later one may set a whole section
        last.pop(name, None)
        last[name] = each
    return list(last.values())


def _check_service(data: Any) -> None:
    if isinstance(data, dict) and {"dataset", "service"} <= data.keys():
        raise ConfigError(
            "data.service must be left out if data is a dataset of your own, because the service reads ingested data",
            got=data["service"],
            fix="Call tf.data's own service in the dataset's function (`.apply(tf.data.experimental.service."
            "distribute(...))`), or use files (data.source).",
        )


def _check_rollout(push: Any) -> None:
    """Check the settings of a rollout; add `push.settings` to its errors, which do not know this file's keys."""
    if not isinstance(push, dict) or "settings" not in push:
        return
    where = "push.settings"
    try:
        build(RolloutSettings, push["settings"], where=where)
    except ConfigError as error:
        rule = error.rule
        if not rule.startswith(where):
            names = {each.name for each in dataclasses.fields(RolloutSettings)}
            rule = f"{where}.{rule}" if rule.split(" ", 1)[0] in names else f"{where}: {rule}"
        raise ConfigError(rule, got=error.got, fix=error.fix) from None


def data_fingerprint(experiment: Experiment) -> str:
    """Return the fingerprint of the data's source: its files, or the user's code."""
    own = experiment.own_dataset
    if own is None:
        return data_source_fingerprint(experiment.files)
    code = experiment.source_fingerprint(own.dataset)
    return fingerprint({"code": code, "options": own.options})


_MAX_SOURCE = 200
"""Maximum length of a value that an error suggests as `data.source`, characters."""


def _own_dataset(reference: str) -> OwnDatasetConfig:
    if ":" not in reference:
        source = repr(reference) if len(reference) <= _MAX_SOURCE else "PATH"
        raise ConfigError(
            "data must be a section, or MODULE:FUNCTION of a tf.data.Dataset",
            got=reference,
            fix=f"Write `data: {{source: {source}}}` for files.",
        )
    return OwnDatasetConfig(dataset=reference)


_STORE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
"""Matches the start of a URI that was parsed as a path, which has one slash instead of two."""

_PATH_KEYS = (("data", "source"), ("data", "cache_dir"), ("runs",), ("models",))
"""Settings that hold a path."""


def _paths_from(raw: dict[str, Any], folder: Path) -> dict[str, Any]:
    raw = with_overrides(raw, ())
    for key in _PATH_KEYS:
        where: Any = raw
        for part in key[:-1]:
            where = where.get(part) if isinstance(where, dict) else None
        if isinstance(where, dict) and isinstance(where.get(key[-1]), str):
            where[key[-1]] = _absolute(where[key[-1]], folder)
    return raw


def path_overrides(target: Path, folder: Path) -> list[str]:
    """Return `--set` assignments of the experiment's paths, so that a copy of its code still finds its files.

    The folder of runs is left out.

    Args:
        target: Folder of the copy of the experiment's code.
        folder: The experiment's folder, to which the paths are relative.
    """
    raw = _paths_from({"models": "models"} | read_yaml(target / FILE), folder)
    data = raw.get("data")
    found = {"models": raw["models"]}
    if isinstance(data, dict):
        found |= {f"data.{key}": data[key] for key in ("source", "cache_dir") if key in data}
    return [f"{key}={json.dumps(path)}" for key, path in found.items()]


def _absolute(path: str, folder: Path) -> str:
    return path if "://" in path else str(folder / Path(path).expanduser())


def _with_section(from_file: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Expand `data: module:function` to the section that it abbreviates, if an assignment sets a key of the section."""
    data = from_file.get("data")
    if isinstance(data, str) and ":" in data and isinstance(given.get("data"), dict):
        return from_file | {"data": {"dataset": data}}
    return from_file


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    result = dict(below)
    for key, value in above.items():
        old = result.get(key)
        both = isinstance(old, dict) and isinstance(value, dict)
        result[key] = _merged(old, value) if both else value  # type: ignore[arg-type]  # `both` checks the types
    return result


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def prepare_source(experiment: Experiment, log: Callable[[str], None]) -> None:
    """Call `data.prepare(path)` if the source does not exist yet.

    Raises:
        ConfigError: the function failed, or did not create the source.
    """
    if experiment.own_dataset is not None:
        return
    source, reference = experiment.files.source, experiment.files.prepare
    if reference is None or Path(source).exists():
        return
    if experiment.folder.resolve() not in Path(source).resolve().parents:
        # A missing path outside the experiment folder is probably a typo, so do not create anything there.
        return
    made = Path(source)
    with alone(made.parent / f".{made.name}.lock"):
        if made.exists():
            return
        log(f"{source} does not exist yet: {reference} creates it")
        prepare = load_function(experiment.folder, reference, where="data.prepare")
        sweep(made.parent, made.name)
        with scratch_folder(made) as scratch:
            target = scratch / made.name
            call(prepare, target, what=reference)
            if not target.exists():
                raise ConfigError(
                    f"{reference} must write to the path that it receives",
                    got=Plain(f"nothing at {target}"),
                )
            os.rename(target, made)
