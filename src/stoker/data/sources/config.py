"""The section `data` of `stoker.yaml`: where the records are, and how they are read and split."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from stoker.core.errors import ConfigError, Plain
from stoker.data.sources.uri import is_uri, parse_uri
from stoker.data.sources.written_numbers import NumberText

Format = Literal["csv", "jsonl", "parquet", "tfrecord", "images"]
"""Formats of the files of a source."""

Override = Literal["int", "float", "string"]
"""Types that `data.types` can set."""

_SPLIT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")

ImageStore = Literal["original", "resized", "raw"]
"""How the training split's images are stored in the shards."""

Duplicates = Literal["spread", "together", "drop"]
"""How equal records are assigned to splits."""

REACH_KEYS = (
    *("cache_bytes", "cache_dir", "store_attempts", "store_backoff_s", "service"),
    "workers",
)
"""Settings for the access to a source or to the shards; they do not change the records."""

MAX_WORKERS = 1024
"""Maximum of the setting `workers`."""

MAX_ROWS = 2**31
"""Maximum number of records in a setting; a larger number is probably a typo."""

MAX_PIXELS_A_SIDE = 1 << 15
"""Maximum side of a converted image, pixels."""

_SHARE_TOLERANCE = 1e-6
"""Maximum deviation of the sum of shares from 1, which is caused by rounding; a larger one is probably a typo."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImagesConfig:
    """How images are converted and stored, and which images are too large to be decoded."""

    size: tuple[int, int] | None = None
    """Height and width to which images are converted, pixels; null: all images must have the same size."""

    channels: Literal[1, 3] | None = None
    """1 (gray) or 3 (RGB); null: 1 if every image is gray, else 3."""

    max_pixels: int = 50_000_000
    """Maximum number of pixels (height times width) of an image; a larger image is a bad record. It is refused by
    its header, before it is decoded."""

    fit: Literal["stretch", "crop"] = "stretch"
    """How an image is converted to `size`. stretch: the whole image is resized, bilinear, without antialiasing.
    crop: a box in its middle, with the aspect ratio of `size`, is resized, bilinear, with antialiasing."""

    crop: float = 0.875
    """With `fit: crop`, the side of the box relative to the largest box that fits in the image; rounded to
    thousandths. 0.875 is 224 / 256."""

    store: ImageStore | Literal["auto"] = "auto"
    """How the training split's images are stored. original: unchanged bytes. resized: a JPEG whose shorter side
    has `store_size` pixels. raw: the pixels, resized in the same way. auto: the store that saves the most CPU time
    over all epochs; resized and raw lose quality, and are chosen only with `allow_lossy`. All other splits keep the
    original bytes."""

    allow_lossy: bool = False
    """Whether `store: auto` may choose resized or raw."""

    store_size: int | None = None
    """Shorter side of a resized or raw image, pixels; null: 8/7 of the shorter side of `size` (256 for 224)."""

    quality: int = 90
    """JPEG quality of a resized image."""

    def __post_init__(self) -> None:
        if self.size is not None and (
            len(self.size) != 2 or min(self.size) < 1 or max(self.size) > MAX_PIXELS_A_SIDE
        ):
            raise ConfigError(
                "data.images.size must be [height, width], each at least 1 pixel and at most "
                f"{MAX_PIXELS_A_SIDE:,}",
                got=list(self.size),
                fix="Write for example `size: [224, 224]`.",
            )
        if self.channels not in (None, 1, 3):
            raise ConfigError(
                "data.images.channels must be 1 (gray) or 3 (RGB)",
                got=self.channels,
                fix="Leave it out to use the number of channels that the images have.",
            )
        if self.max_pixels < 1:
            raise ConfigError("data.images.max_pixels must be at least 1", got=self.max_pixels)
        self._check_fit_and_store()

    def _check_fit_and_store(self) -> None:
        if not 0 < self.crop <= 1:
            raise ConfigError("data.images.crop must be above 0 and at most 1", got=self.crop)
        if not 1 <= self.quality <= 100:
            raise ConfigError("data.images.quality must be from 1 to 100", got=self.quality)
        if self.store_size is not None and not 1 <= self.store_size <= MAX_PIXELS_A_SIDE:
            raise ConfigError(
                f"data.images.store_size must be from 1 to {MAX_PIXELS_A_SIDE:,}",
                got=self.store_size,
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnsConfig:
    """Which columns of the files are read."""

    exclude: tuple[str, ...] = ()
    """Columns that are left out; their values are neither checked nor kept."""

    lists: tuple[str, ...] = ()
    """Columns that are read as lists of varying length, even if (nearly) all lists have the same length. Without
    this setting, such a column is read as vectors or, if the length is 1, as single values."""


def leaving_out(column: str) -> str:
    """Return the setting that leaves out a column, for a message."""
    return f"data.columns: {{exclude: [{column!r}]}}"


def as_lists(column: str) -> str:
    """Return the setting to read a column as lists of varying length, for a message."""
    return f"data.columns: {{lists: [{column!r}]}}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceConfig:
    """A tf.data service whose workers make the training batches."""

    address: str
    """`host:port` or `grpc://host:port` of the service's dispatcher, as `stoker data-service start` prints it."""

    workers: int = 1
    """Number of workers that must answer before training begins."""

    timeout_s: float = 60.0
    """Maximum wait for the workers' answers, seconds."""

    def __post_init__(self) -> None:
        split_address(self.address)
        if self.workers < 1:
            raise ConfigError("data.service.workers must be at least 1", got=self.workers)
        if not 0 < self.timeout_s < math.inf:
            raise ConfigError("data.service.timeout_s must be above 0", got=self.timeout_s)


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of an address, `grpc://host:port` or `host:port`.

    Raises:
        ConfigError: the address has a different form.
    """
    host, _, port = address.removeprefix("grpc://").rpartition(":")
    if not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ConfigError(
            "the address of a tf.data service (data.service.address) must be host:port",
            got=address,
            fix="Write for example 127.0.0.1:5050, or grpc://127.0.0.1:5050.",
        )
    return host, int(port)


@dataclass(frozen=True, kw_only=True, slots=True)
class IngestConfig:
    """Where the records are, how they are read, and how they are split."""

    source: str
    """A file, a folder or a glob (`*`, `?`, `[...]`, `**`), on this machine or at `s3://` or `gs://`: CSV, JSON
    Lines, Parquet or TFRecord files, or a folder of images with a sub-folder for each class."""

    prepare: str | None = None
    """`module:function` that writes the source; `stoker run` calls it before ingest."""

    format: Literal["auto", Format] = "auto"
    """Format of the files. auto: the format that the names of the files show. Set it if the names do not show it,
    like `train-00000-of-00010`. Compressed files (gzip) are recognized by their first bytes."""

    delimiter: str = ","
    """Character that separates the fields of a CSV file; `\t` is a tab."""

    splits: dict[str, float] = field(default_factory=lambda: {"train": 0.8, "eval": 0.2})
    """Split -> its share of the records. A record is assigned to a split by its content, not by its position; for
    equal records, see `duplicates`."""

    split_by: str | None = None
    """A key column: records with the same key (a user, a patient) are always in the same split."""

    duplicates: Duplicates | None = None
    """How equal records are assigned to splits. spread: each copy separately, as in a random split. together: all
    copies to the same split. drop: only the first copy is kept. null: spread for tables, together for images, which
    are compared by their bytes. `split_by` takes precedence over spread."""

    seed: int = 0
    """Seed of the splits: a different seed gives different splits with the same shares."""

    columns: ColumnsConfig = field(default_factory=ColumnsConfig)
    """Which columns of the files are read; all by default."""

    types: dict[str, Override | NumberText] = field(default_factory=dict)
    """Column -> type (int, float or string), for columns whose values suggest a wrong type. For numbers that are
    written as text, the type is an example: `{number: "1,234.5"}`."""

    missing_values: tuple[str, ...] = ()
    """Strings that mean "missing" in columns of numbers, in addition to the empty string, NA, N/A, NaN, nan, null,
    NULL and None. In columns of strings, only the empty string is a missing value, as in a request."""

    max_bad_rows: int = 0
    """Maximum number of records that may be left out because they cannot be read."""

    images: ImagesConfig = field(default_factory=ImagesConfig)
    """How images are converted and stored."""

    shard_rows: int = 1 << 18
    """Maximum number of records in a shard; a shard also ends at 64 MiB."""

    cache_bytes: int = 20 << 30
    """Maximum size of the cache for files from `s3://` and `gs://` on this machine, bytes; the least recently used
    files are removed first. The cache must be able to hold the largest file."""

    cache_dir: Path | None = None
    """Folder of the cache. null: in a job, a folder on the machine's local disk (`$SLURM_TMPDIR` or `$TMPDIR`);
    else `$XDG_CACHE_HOME/stoker`, or `~/.cache/stoker`."""

    store_attempts: int = 5
    """Number of attempts for a request to `s3://` or `gs://`."""

    store_backoff_s: float = 0.5
    """Pause after the first failed attempt, seconds; it is doubled after each further failed attempt."""

    workers: int | None = None
    """Number of processes that read and check records, 1 to 1,024. null: one for each core that is available to
    this process; but threads, if the source is small, is in a store, or is read equally fast in threads. The result
    does not depend on this setting."""

    service: ServiceConfig | None = None
    """A tf.data service whose workers make the training batches; null: this process makes them."""

    def __post_init__(self) -> None:
        _check_source(self.source)
        if self.prepare is not None and is_uri(self.source):
            raise ConfigError(
                "data.source must be local if data.prepare writes it", got=Plain("a URI")
            )
        _check_splits(self.splits)
        if self.delimiter == "\\t":
            # A shell and unquoted YAML pass a tab as a backslash and a t.
            object.__setattr__(self, "delimiter", "\t")
        _check_delimiter(self.delimiter)
        for name, least, most in (
            ("max_bad_rows", 0, MAX_ROWS),
            ("shard_rows", 1, MAX_ROWS),
            ("cache_bytes", 1, math.inf),
            ("store_attempts", 1, 1000),
            ("store_backoff_s", 0, 3600),
            ("workers", 1, MAX_WORKERS),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"data.{name} must be at least {least}", got=value)
            if value is not None and not value <= most:
                raise ConfigError(f"data.{name} must be at most {most:,}", got=value)
        _check_choices(self)
        for column, override in self.types.items():
            if not isinstance(override, NumberText) and override not in get_args(Override):
                raise ConfigError(
                    f"data.types.{column} must be int, float or string, or {{number: ...}}",
                    got=override,
                    fix="Leave the column out to derive its type from the values.",
                )

    def duplicates_for(self, dtypes: Iterable[str]) -> Duplicates:
        """Return the setting `duplicates`, or its default for columns of these types."""
        return self.duplicates or ("together" if "image" in dtypes else "spread")


def _check_choices(config: IngestConfig) -> None:
    if config.format not in ("auto", *get_args(Format)):
        raise ConfigError(
            f"data.format must be one of auto, {', '.join(get_args(Format))}",
            got=config.format,
            fix="Leave it out to derive the format from the names of the files.",
        )
    if config.duplicates not in (None, *get_args(Duplicates)):
        raise ConfigError(
            f"data.duplicates must be one of {', '.join(get_args(Duplicates))}",
            got=config.duplicates,
            fix="Leave it out for the default: spread for tables, together for images.",
        )


def _check_source(source: str) -> None:
    if not source:
        raise ConfigError(
            "data.source must name a file, a folder or a glob",
            got=source,
            fix="Write for example `source: data/taxi.csv`.",
        )
    if is_uri(source):
        parse_uri(source)


def _check_splits(splits: dict[str, float]) -> None:
    fix = "Write for example `splits: {train: 0.8, eval: 0.2}`."
    missing = [name for name in ("train", "eval") if name not in splits]
    if missing:
        raise ConfigError("data.splits must name both train and eval", got=splits, fix=fix)
    for name, share in splits.items():
        if not _SPLIT_NAME.fullmatch(name):
            raise ConfigError(
                "the name of a split must consist of letters, digits, - and _, and not begin with - or _",
                got=name,
                fix=fix,
            )
        if not 0 < share < 1:
            raise ConfigError(
                f"data.splits.{name} must be a share between 0 and 1", got=share, fix=fix
            )
    total = math.fsum(splits.values())
    if abs(total - 1) > _SHARE_TOLERANCE:
        raise ConfigError("the shares of data.splits must add up to 1", got=total, fix=fix)


def _check_delimiter(delimiter: str) -> None:
    is_one = len(delimiter) == 1 and delimiter.isascii()
    if not is_one or delimiter in '"\r\n\0' or delimiter.isalnum():
        raise ConfigError(
            "data.delimiter must be one ASCII character that is not a letter, a digit, a quote, NUL or a "
            "line end",
            got=delimiter,
            fix='Write for example `delimiter: ";"`, or `delimiter: "\\t"` for tabs.',
        )
