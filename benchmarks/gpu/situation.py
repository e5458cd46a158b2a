"""The arguments of a part, and the record to which each figure is added immediately."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import data
import records
from children import Child, Children
from figures import Figure, figure
from sizes import CPU, GPU, Sizes
from steps import MARK

from stoker.cluster.devices import find_devices

ROOT = Path(__file__).resolve().parents[2]


@dataclass(kw_only=True)
class Situation:
    """One part while it runs."""

    part: str
    device: str
    """`gpu` or `cpu`."""

    results: Path
    """The file of records."""

    work: Path
    """Folder of data, experiments and caches; kept between parts and calls."""

    limit_s: float
    """Time limit of the part, seconds."""

    began_s: float = field(default_factory=time.monotonic)
    figures: list[Figure] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sizes: Sizes = GPU if self.device == "gpu" else CPU
        folder = self.work / "output" / f"{self.part}-{os.getpid()}-{time.monotonic_ns()}"
        self.children = Children(folder=folder, forked=self.device == "cpu")
        self.put()

    def left_s(self) -> float:
        """Seconds until the part is ended."""
        return self.limit_s - (time.monotonic() - self.began_s)

    def add(self, name: str, value: float | None, unit: str, **more: Any) -> None:
        """Add a figure; it is in the file when this returns.

        Args:
            name: What was measured.
            value: None without a value; `how` then says why.
            unit: Unit of the value.
            more: `at_least`, `at_most`, `peer`, `how` as in `figures.figure`; `rate_of` for a
                rate from which figures over several parts are computed.
        """
        rate_of = more.pop("rate_of", None)
        made = figure(name, float("nan") if value is None else value, unit, **more)
        if value is None:
            made |= {"value": None, "holds": False if made["target"] is not None else None}
        if rate_of:
            made["rate_of"] = rate_of
        self.figures.append(made)
        self.put()
        shown = "none" if value is None else f"{made['value']:g}"
        sys.stdout.write(f"{name}: {shown} {unit}; {made['how']}\n")
        sys.stdout.flush()

    def take(self, found: Sequence[Figure]) -> None:
        """Add figures from another benchmark."""
        self.figures += found
        self.put()
        for each in found:
            sys.stdout.write(f"{each['name']}: {each['value']:g} {each['unit']}; {each['how']}\n")

    def put(self) -> None:
        """Write the record in its current state."""
        record = {
            "part": self.part,
            "device": records.GPU if self.device == "gpu" else records.CPU,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "commit": commit(),
            "machine": {"cores": len(os.sched_getaffinity(0)), "python": platform.python_version()},
            "status": "running",
            "mark": os.environ.get(MARK, ""),
            "took_s": round(time.monotonic() - self.began_s, 1),
            "card": {},
            "during": {},
            "refused": ["cut off before the card was looked at again"],
            "figures": self.figures,
        }
        records.put(self.results, record)

    def photographs(self) -> Path:
        """The folder of JPEG files, created if it is missing."""
        sizes = self.sizes
        return data.photographs(
            self.work / f"photographs-{sizes.photographs}-{sizes.width}",
            count=sizes.photographs,
            height=sizes.height,
            width=sizes.width,
        )

    def records(self) -> list[Path]:
        """The same as TFRecord files."""
        return data.records(self.photographs(), files=4 if self.device == "cpu" else 16)

    def fit(
        self,
        kind: str,
        experiment: Path,
        lines: Path,
        *more: str,
        seconds: float,
        env: Mapping[str, str] = {},
    ) -> Child:
        """Start `model.fit` on an experiment's model; it ends after this many seconds."""
        sizes = self.sizes
        batch = sizes.batch if kind == "images" else sizes.texts
        return self.children.python(
            Path(__file__).with_name("fit.py"), kind, experiment, "--lines", lines,
            "--seconds", str(seconds), "--precision", sizes.precision,
            "--crop", str(sizes.crop), "--batch", str(batch), *more, env=env,
        )  # fmt: skip

    def card_name(self) -> str:
        """The name by NVML of the GPU that TensorFlow takes, or of its slice; empty on the CPU."""
        gpus = find_devices().gpus
        return gpus[0].name if gpus and self.device == "gpu" else ""

    def environment(self, cache: Path) -> dict[str, str]:
        """Folder of this process and its children for compiled programs and autotuning results."""
        cache.mkdir(parents=True, exist_ok=True)
        return {"STOKER_CACHE": str(cache)}


def commit() -> str:
    """The measured commit; a rented machine has no repository and gets the commit's name."""
    if "STOKER_COMMIT" in os.environ:
        return os.environ["STOKER_COMMIT"]
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=7"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or "unknown"
