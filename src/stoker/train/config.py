"""The `train` section, and the fixed rules for the value of each `auto`."""

from __future__ import annotations

import ipaddress
import math
import re
from dataclasses import dataclass, field
from typing import Literal

from stoker.cluster.devices import Devices
from stoker.core.errors import ConfigError, Plain
from stoker.data.feed.config import FeedConfig
from stoker.data.feed.images.augment import AugmentConfig
from stoker.train.elastic import ElasticConfig, require_elastic_settings
from stoker.train.health.divergence import DivergenceConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryConfig:
    """The `train.memory` section; without a GPU it has no effect."""

    growth: bool = True
    """Take GPU memory when it is needed, instead of all of it at the start."""

    limit_mb: int | None = None
    """Memory that this process takes on each GPU, MiB; it is taken at the start, so `growth` has no
    effect. null: all memory."""

    visible_devices: tuple[int, ...] | None = None
    """GPUs that this process may use, by number. null: all."""

    def __post_init__(self) -> None:
        if self.limit_mb is not None and self.limit_mb < 1:
            raise ConfigError("train.memory.limit_mb must be at least 1", got=self.limit_mb)
        if self.visible_devices is None:
            return
        if len(set(self.visible_devices)) != len(self.visible_devices):
            raise ConfigError(
                "train.memory.visible_devices must not name a GPU twice",
                got=list(self.visible_devices),
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorBoardConfig:
    """What TensorBoard shows in addition to loss, metrics and speed."""

    histograms_every_steps: int | None = None
    """Steps between two histograms of every weight. null: once per epoch; 0: never."""

    gradients: bool = True
    """Show histograms of the gradients, too; each time, this takes one more pass over the same batch."""

    graph: bool = True
    """Show the graph of a step."""

    embeddings: dict[str, str | None] = field(default_factory=dict)
    """Embedding layers that the projector shows, after each epoch: layer -> vocabulary whose terms label
    the vectors (a feature made with the vocabulary, or its file name), or null for no labels."""

    profile: str | None = None
    """`START:STOP`: first and last step to profile, e.g. 20:30. null: no profile."""

    def __post_init__(self) -> None:
        if self.histograms_every_steps is not None and self.histograms_every_steps < 0:
            raise ConfigError(
                "train.tensorboard.histograms_every_steps must be at least 0",
                got=self.histograms_every_steps,
            )
        if self.profile is not None:
            profiled_steps(self.profile)


def profiled_steps(profile: str) -> tuple[int, int]:
    """Return first and last step of `START:STOP`; the first step of a training is 1.

    Raises:
        ConfigError: The text has another form, or contains no step.
    """
    match = re.fullmatch(r"(\d+):(\d+)", profile)
    first, last = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 0 < first <= last:
        raise ConfigError(
            "train.tensorboard.profile must be START:STOP, steps counted from 1",
            got=profile,
            fix="E.g. profile: 20:30.",
        )
    return first, last


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """The `train.checkpoint` section."""

    every_s: float | Literal["auto"] = "auto"
    """Seconds between two checkpoints. auto: from the measured cost, so that `max_overhead` holds,
    between 5 s and 30 min."""

    every_steps: int | None = None
    """Steps between two checkpoints; if set, `every_s` is ignored."""

    keep_last: int = 3
    """Number of the newest checkpoints to keep: if one is damaged, an older one is used."""

    keep_every_h: float | None = None
    """Also keep a checkpoint for each interval of this many hours of training; null: none."""

    max_overhead: float = 0.035
    """Maximum share of the training time that checkpoints may cost if `every_s` is auto."""

    def __post_init__(self) -> None:
        if self.every_s != "auto" and not self.every_s > 0:
            raise ConfigError("train.checkpoint.every_s must be above 0", got=self.every_s)
        if self.every_steps is not None and self.every_steps < 1:
            raise ConfigError(
                "train.checkpoint.every_steps must be at least 1", got=self.every_steps
            )
        if self.keep_last < 1:
            raise ConfigError(
                "train.checkpoint.keep_last must be at least 1",
                got=self.keep_last,
                fix="With 2 or more, an older checkpoint is left if the newest one is damaged.",
            )
        if self.keep_every_h is not None and not self.keep_every_h > 0:
            raise ConfigError(
                "train.checkpoint.keep_every_h must be above 0", got=self.keep_every_h
            )
        if not 0 < self.max_overhead <= 1:
            raise ConfigError(
                "train.checkpoint.max_overhead must be above 0 and at most 1",
                got=self.max_overhead,
                fix="0.035 is 3.5 % of the training time.",
            )


Auto = Literal["auto"]
StrategyName = Literal["one_device", "mirrored", "multi_worker", "parameter_server", "tpu"]
Precision = Literal["float32", "mixed_bfloat16", "mixed_float16"]

ReductionDtype = Literal["float32", "bfloat16", "float16"]
"""Dtype in which gradients are sent; they are kept in float32."""

MAX = 10_000_000
"""Maximum number of epochs, of rows per batch, and of steps per call: a larger setting is probably a typo."""

MAX_BYTES = 2**40
"""Maximum size of a pack of gradients, bytes: a larger setting is probably a typo."""

MAX_THREADS = 1024
"""Maximum number of threads of a process: a larger setting is probably a typo."""

TEST_SWITCH = "STOKER_XLA_BACKGROUND"
"""Environment variable for tests: XLA is also tried on a CPU, if at least this many seconds remain."""

MAX_SCALE = 2**24
"""Maximum fixed loss scale: a larger setting is probably a typo."""

BFLOAT16_CAPABILITY = (8, 0)
"""First NVIDIA compute capability whose tensor cores support bfloat16 (Ampere).

Source: NVIDIA, CUDA C++ Programming Guide, "Compute Capabilities".
"""

FLOAT16_CAPABILITY = (7, 0)
"""First NVIDIA compute capability with tensor cores (Volta); before Ampere, they support only float16.

Source: NVIDIA, CUDA C++ Programming Guide, "Compute Capabilities"."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """The `train` section.

    A step is one update of the weights from one global batch, whose size is `batch_size` x `accumulate`
    x number of replicas.
    """

    epochs: int = 10
    """Number of passes over the training split."""

    batch_size: int | Auto = "auto"
    """Number of samples of a replica in one pass. auto: the largest power of two up to rows / 64, between
    16 and 512, divided by the number of replicas."""

    accumulate: int = 1
    """Number of passes whose gradients are summed for one update; they are reduced over replicas once."""

    steps_per_call: int | Auto = "auto"
    """Number of steps per call from Python. auto: the steps of an epoch, at most 50; 1 if a callback has
    a batch hook."""

    precision: Precision | Auto = "auto"
    """Keras dtype policy. auto: mixed_bfloat16 on TPUs and if all GPUs have compute capability 8.0
    or higher, mixed_float16 if all have 7.0 or higher, else float32."""

    loss_scale: float | Literal["auto", "dynamic"] = "auto"
    """Factor by which the loss is multiplied before the backward pass, so that small gradients in float16
    do not become zero. dynamic: halved when gradients overflow, which skips the step, and doubled after
    2,000 good steps. A number: fixed, and no step is skipped. auto: dynamic for mixed_float16, else
    1."""

    tf32: bool = True
    """Let NVIDIA GPUs (Ampere or newer) multiply float32 numbers with 10 bits of mantissa."""

    xla: bool | Auto = "auto"
    """Compile the step with XLA: forward and backward pass, and on a single device the update.
    auto: off, except on a single GPU: training starts without XLA, compiles in the background, compares
    both forms of the step on its own batches, and keeps the faster one. XLA is not tried with
    train.deterministic, a lock file, several devices, or a string feature. On a TPU, the whole step
    is always compiled."""

    strategy: StrategyName | Auto = "auto"
    """How the step is distributed over devices. auto: as TF_CONFIG says, else mirrored over several
    GPUs, else one device. tpu must be set explicitly, and was not run on hardware."""

    replicas: int | Auto = "auto"
    """Number of replicas in this process. auto: one per GPU. Without GPUs, the CPU is split into this
    many devices. With a TPU, set the number of its cores."""

    elastic: ElasticConfig | None = None
    """Let a restart continue with another number of workers: `{min: 2, max: 8}`. The global batch is
    always divided into `max` parts of `batch_size` rows. null: the number of workers of a run cannot
    change."""

    scale_lr: Literal["none", "linear", "sqrt"] = "none"
    """Factor by which the learning rate is multiplied: 1, n, or the square root of n. n is the global
    batch size divided by `batch_size`: accumulate x replicas (with `elastic`: x virtual workers)."""

    clip_norm: float | None = None
    """Maximum global norm of all gradients, after reduction over replicas. null: no limit."""

    class_weight: dict[int, float] | None = None
    """Class -> weight of its samples; 1 for other classes. Validation uses the weights too, because its
    loss selects the best epoch. (`Model.fit` validates without weights.)"""

    sample_weight: str | None = None
    """Name of the weight of each sample in training and validation: an output of the preprocessing
    function, else a raw column. The weights are numbers of 0 or more. It must not be a feature, and
    serving does not need it."""

    ema: float | None = None
    """Momentum of an exponential moving average of the weights, e.g. 0.999; the average is
    validated and exported."""

    reduction_dtype: ReductionDtype = "float32"
    """Dtype in which gradients are sent between replicas."""

    reduction_bytes_per_pack: int = 0
    """Minimum size of a pack of gradients that replicas exchange, bytes: the first packs are sent while
    later gradients are still computed. 0: a single pack, when all gradients are ready. No effect with
    one replica."""

    callbacks: str | None = None
    """`module:function` that returns a list of keras.callbacks.Callback."""

    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """How often checkpoints are written, and which are kept."""

    on_oom: Literal["reduce", "stop"] = "reduce"
    """Reaction to a step that does not fit in memory. reduce: half the batch and twice
    `accumulate`, which keeps the global batch; stop: end with an error that shows the size."""

    on_nan: Literal["stop", "rollback"] = "stop"
    """Reaction to a loss or gradient that is not finite. rollback: return to the last checkpoint,
    and continue without the samples of that step."""

    nan_budget: int = 3
    """Maximum number of rollbacks in a run."""

    divergence: DivergenceConfig = field(default_factory=DivergenceConfig)
    """When a growing loss is reported as divergence."""

    memory: MemoryConfig = field(default_factory=MemoryConfig)
    """GPU memory that TensorFlow may take."""

    intra_op_threads: int | None = None
    """Number of CPU threads for one operation. null: TensorFlow's default, all cores."""

    inter_op_threads: int | None = None
    """Number of CPU operations that run at once. null: TensorFlow's default, the number of cores."""

    remat: tuple[str, ...] = ()
    """Layers, by name or pattern (`block*`), whose activations are not kept, but computed again in the
    backward pass, to save memory."""

    tensorboard: TensorBoardConfig = field(default_factory=TensorBoardConfig)
    """What TensorBoard shows in addition to loss, metrics and speed."""

    metrics_port: int | None = None
    """Port on which the run serves its metrics for Prometheus, at /metrics. 0: a free port; null: the
    metrics are not served."""

    metrics_host: str = "127.0.0.1"
    """IPv4 address of this machine on which `metrics_port` listens. 0.0.0.0: all addresses. Other machines
    can read the metrics without authentication, unless the address is 127.0.0.1."""

    metrics_textfile: str | None = None
    """File for node_exporter (`*.prom`) with the same metrics, written every 5 seconds and removed
    at the end. null: no file."""

    max_restarts: int = 3
    """How often `stoker train --workers` restarts all workers after one of them failed."""

    watchdog_s: float = 300.0
    """Seconds without a heartbeat after which a worker counts as hung, and all workers restart."""

    deterministic: bool = False
    """With the same seed and data, compute bit-identical weights; this costs some speed."""

    seed: int = 0
    """Seed of weights, dropout and the order of samples."""

    augment: AugmentConfig | None = None
    """Augmentation of training images; not used in validation, evaluation and serving."""

    feed: FeedConfig = field(default_factory=FeedConfig)
    """How batches are prepared while the step runs; only `decoder` can change the results of training."""

    monitor: str = "val_loss"
    """The metric that selects the best epoch: `val_loss`, or `val_` + the name of a metric of the model."""

    monitor_mode: Literal["min", "max", "auto"] = "auto"
    """Whether lower (min) or higher (max) is better. auto: lower for losses and errors, else higher."""

    def __post_init__(self) -> None:
        least = dict.fromkeys(
            ("epochs", "batch_size", "accumulate", "steps_per_call", "replicas"), 1
        ) | {"nan_budget": 0, "max_restarts": 0, "reduction_bytes_per_pack": 0}
        for name, least_value in least.items():
            most = MAX_BYTES if name == "reduction_bytes_per_pack" else MAX
            _require_count(name, getattr(self, name), least=least_value, most=most)
        for name in ("intra_op_threads", "inter_op_threads"):
            threads = getattr(self, name)
            if threads is not None and not 1 <= threads <= MAX_THREADS:
                raise ConfigError(f"train.{name} must be from 1 to {MAX_THREADS:,}", got=threads)
        _require_metrics(self.metrics_host, self.metrics_port, self.metrics_textfile)
        if not 0 <= self.seed < 2**31:
            raise ConfigError("train.seed must be from 0 to 2**31 - 1", got=self.seed)
        if not self.monitor.startswith("val_"):
            raise ConfigError(
                "train.monitor must begin with val_", got=self.monitor, fix="E.g. val_loss."
            )
        _require_update(self)
        if not self.watchdog_s > 0:
            raise ConfigError("train.watchdog_s must be above 0", got=self.watchdog_s)
        if self.elastic is not None:
            _require_elastic(self)


def _require_update(config: TrainConfig) -> None:
    if not isinstance(config.loss_scale, str) and not 1 <= config.loss_scale <= MAX_SCALE:
        raise ConfigError(
            f"train.loss_scale must be from 1 to {MAX_SCALE:,}",
            got=config.loss_scale,
            fix="Set it to dynamic, or to a power of two such as 128.",
        )
    if config.clip_norm is not None and not 0 < config.clip_norm < math.inf:
        raise ConfigError("train.clip_norm must be above 0", got=config.clip_norm)
    if config.ema is not None and not 0 < config.ema < 1:
        raise ConfigError(
            "train.ema must lie between 0 and 1", got=config.ema, fix="E.g. train.ema: 0.999."
        )


def _require_elastic(config: TrainConfig) -> None:
    require_elastic_settings(
        {
            f"train.accumulate: {config.accumulate}": config.accumulate > 1,
            f"train.reduction_dtype: {config.reduction_dtype}": config.reduction_dtype != "float32",
            f"train.strategy: {config.strategy}": config.strategy in ("parameter_server", "tpu"),
        }
    )


def _require_count(name: str, value: int | Auto, *, least: int, most: int) -> None:
    if value != "auto" and value < least:
        raise ConfigError(f"train.{name} must be at least {least}", got=value)
    if value != "auto" and value > most:
        raise ConfigError(f"train.{name} must be at most {most:,}", got=value)


def _require_metrics(host: str, port: int | None, textfile: str | None) -> None:
    try:
        ipaddress.IPv4Address(host)
    except ValueError:
        raise ConfigError(
            "train.metrics_host must be an IPv4 address of this machine",
            got=host,
            fix="127.0.0.1 is for this machine alone; 0.0.0.0 stands for all its addresses.",
        ) from None
    if port is not None and not 0 <= port < 2**16:
        raise ConfigError("train.metrics_port must be from 0 to 65,535", got=port)
    if textfile is not None and not textfile.endswith(".prom"):
        raise ConfigError(
            "train.metrics_textfile must end in .prom: node_exporter reads no other file",
            got=textfile,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedTraining:
    """The value of each `auto` on this machine; stored with the run and used again on resume."""

    batch_size: int
    """Number of samples of a replica in one pass."""

    accumulate: int
    """Number of passes per update."""

    replicas: int
    """Number of copies of the model, over all workers."""

    workers: int
    """Number of worker processes."""

    steps_per_call: int
    precision: Precision
    xla: bool
    strategy: StrategyName

    lr_factor: float
    """Factor by which the learning rate is multiplied."""

    virtual_workers: int = 0
    """Number of slices of the global batch in an elastic training, which are distributed evenly over the
    replicas; 0: the training is not elastic."""

    xla_trial: bool = False
    """Whether the run starts without XLA and tries XLA later."""

    why: dict[str, str]
    """Setting -> reason for its value."""

    @property
    def global_batch(self) -> int:
        """Samples per step."""
        return self.batch_size * self.accumulate * (self.virtual_workers or self.replicas)


@dataclass(frozen=True, kw_only=True, slots=True)
class AutoInputs:
    """Facts that the rules of `auto` use in addition to the settings."""

    devices: Devices
    rows: int
    """Number of samples in the training split."""

    string_features: bool
    """Whether a feature of the model is a string."""

    workers: int = 1
    """Number of workers in TF_CONFIG; 1 without it."""

    parameter_servers: int = 0
    """Number of parameter servers in TF_CONFIG."""

    batches_from_elsewhere: bool = False
    """Whether batches come from a user-defined dataset or from a data service."""

    data_service: bool = False
    """Whether batches come from a data service."""

    tuned: bool = False
    """Whether a lock file is used: settings that `stoker tune` found are not measured again."""

    tries_xla_on_cpu: bool = False
    """For tests: try XLA during a run even without a GPU."""


def resolve(config: TrainConfig, inputs: AutoInputs) -> ResolvedTraining:
    """Apply the fixed rules of each `auto`; nothing is measured.

    Args:
        config: The user's section.
        inputs: Devices, data, and the cluster.

    Raises:
        ConfigError: XLA is set but a feature is a string, a strategy needs a cluster that does not
            exist, or a TPU does not support a setting.
    """
    if config.xla is True and inputs.string_features:
        raise ConfigError(
            "train.xla: true needs numeric features only, because XLA does not support strings",
            got=True,
            fix="Turn strings into ids in preprocessing_fn, or set train.xla: auto.",
        )
    gpus = len(inputs.devices.gpus)
    strategy, why = _strategy(config, inputs)
    virtual = config.elastic.max if config.elastic is not None else 0
    if virtual:
        require_elastic_settings(
            {
                "parameter servers": strategy == "parameter_server",
                "data.service": inputs.data_service,
            }
        )
    local = _replicas(config, gpus, strategy)
    replicas = local * (inputs.workers if strategy == "multi_worker" else 1)
    on_tpu = strategy == "tpu"
    untried = _why_xla_is_not_tried(config, inputs, strategy)
    batch_size = (
        config.batch_size
        if config.batch_size != "auto"
        else max(1, _auto_batch_size(inputs.rows) // ((virtual or replicas) * config.accumulate))
    )
    parts = config.accumulate * (virtual or replicas)
    epoch_steps = inputs.rows / (batch_size * parts)
    if on_tpu:
        _require_whole_step(inputs.rows, batch_size * parts)
    precision, why_precision = _precision(config, inputs.devices, strategy)
    steps = math.floor(epoch_steps) if on_tpu else math.ceil(epoch_steps)
    return ResolvedTraining(
        batch_size=batch_size,
        accumulate=config.accumulate,
        replicas=replicas,
        workers=inputs.workers if strategy in ("multi_worker", "parameter_server") else 1,
        steps_per_call=min(steps, 50 if config.steps_per_call == "auto" else config.steps_per_call),
        precision=precision,
        xla=config.xla is True,
        xla_trial=not untried,
        virtual_workers=virtual,
        strategy=strategy,
        lr_factor={"none": 1.0, "linear": float(parts), "sqrt": math.sqrt(parts)}[config.scale_lr],
        why={
            "strategy": why,
            "precision": why_precision,
            "xla": untried or "tried while the run trains",
        },
    )


def _why_xla_is_not_tried(config: TrainConfig, inputs: AutoInputs, strategy: StrategyName) -> str:
    """Return why XLA is not tried during the run; empty if it is tried."""
    if config.xla != "auto":
        return "as set"
    reasons = {
        "no GPU": not inputs.devices.gpus and not inputs.tries_xla_on_cpu,
        "a feature is a string": inputs.string_features,
        # Steps with and without XLA round differently, so the result would depend on when XLA is used.
        "train.deterministic": config.deterministic,
        "train.memory takes all memory, and the compiler needs some": not config.memory.growth
        and config.memory.limit_mb is None,
        "stoker.lock.yaml has the measured settings": inputs.tuned,
        "train.elastic: another number of workers would decide differently": config.elastic
        is not None,
        f"train.strategy is {strategy}, and XLA is tried on one device only": strategy
        != "one_device",
    }
    return next((why for why, holds in reasons.items() if holds), "")


def _strategy(config: TrainConfig, inputs: AutoInputs) -> tuple[StrategyName, str]:
    if config.strategy != "auto":
        if config.strategy == "tpu":
            _require_for_tpu(config, inputs)
        if config.strategy == "parameter_server" and not inputs.parameter_servers:
            raise ConfigError(
                "train.strategy: parameter_server needs a cluster with a parameter server",
                got=Plain("no `ps` in TF_CONFIG"),
                fix="`stoker train --workers 2 --parameter-servers 1` starts one here.",
            )
        return config.strategy, "as set"
    if inputs.parameter_servers:
        return "parameter_server", f"TF_CONFIG names {inputs.parameter_servers} parameter servers"
    if inputs.workers > 1:
        return "multi_worker", f"TF_CONFIG names {inputs.workers} workers"
    gpus = len(inputs.devices.gpus)
    if gpus > 1:
        return "mirrored", f"{gpus} GPUs on this machine"
    if config.replicas not in ("auto", 1):
        return "mirrored", f"train.replicas is {config.replicas}"
    return "one_device", "one GPU" if gpus else "no GPU"


def _replicas(config: TrainConfig, gpus: int, strategy: StrategyName) -> int:
    if strategy == "one_device":
        if config.replicas not in ("auto", 1):
            raise ConfigError(
                "train.strategy: one_device has one replica",
                got=config.replicas,
                fix="Remove train.replicas, or set train.strategy: mirrored.",
            )
        return 1
    if config.replicas != "auto":
        return config.replicas
    # With a parameter server, each worker computes its own batches, so a step has a single replica.
    return 1 if strategy == "parameter_server" else max(1, gpus)


def _auto_batch_size(rows: int) -> int:
    return min(512, max(16, 1 << max(0, (rows // 64).bit_length() - 1)))


def _require_for_tpu(config: TrainConfig, inputs: AutoInputs) -> None:
    """Reject settings that a TPU, or Stoker on a TPU, does not support."""
    refused = {
        "features that are strings": inputs.string_features,
        "train.precision: mixed_float16": config.precision == "mixed_float16",
        "train.loss_scale": config.loss_scale != "auto",
        "train.xla, which a TPU always does": config.xla != "auto",
        "train.reduction_bytes_per_pack": config.reduction_bytes_per_pack > 0,
        "batches of a user's own dataset or of data.service": inputs.batches_from_elsewhere,
        "TF_CONFIG with several workers": inputs.workers > 1,
        "train.replicas: auto": config.replicas == "auto",
    }
    found = [what for what, is_there in refused.items() if is_there]
    if found:
        raise ConfigError(
            "train.strategy: tpu needs numeric features from this machine's shards, in float32 or "
            "bfloat16, and train.replicas set to the number of the TPU's cores",
            got=Plain(" and ".join(found)),
            fix="Change it, or use another strategy.",
        )


def _require_whole_step(rows: int, global_batch: int) -> None:
    if rows < global_batch:
        raise ConfigError(
            "train.strategy: tpu needs enough training rows for at least one whole step",
            got=Plain(f"{rows} rows, and {global_batch} rows per step"),
            fix="Reduce train.batch_size.",
        )


def _precision(
    config: TrainConfig, devices: Devices, strategy: StrategyName
) -> tuple[Precision, str]:
    """Return the dtype policy, and the reason.

    bfloat16 is used on all hardware that supports it: it has the range of float32, so nothing overflows
    and no step is skipped. float16 is used only on GPUs whose tensor cores support nothing else. Which
    of the two is faster on GPUs that support both has not been measured yet: `make bench-gpu` measures
    it. If float16 is faster by more than the noise, with the same loss curve, this rule should change.
    """
    if config.precision != "auto":
        return config.precision, "as set"
    if strategy == "tpu":
        return "mixed_bfloat16", "a TPU multiplies bfloat16"
    if not devices.gpus:
        return "float32", "no GPU"
    least = min(gpu.compute_capability for gpu in devices.gpus)
    has = f"compute capability {least[0]}.{least[1]}"
    if least >= BFLOAT16_CAPABILITY:
        return "mixed_bfloat16", f"{has} has tensor cores for bfloat16"
    if least >= FLOAT16_CAPABILITY:
        return "mixed_float16", f"{has} has tensor cores for float16, not for bfloat16"
    return "float32", f"{has} has no tensor cores"
