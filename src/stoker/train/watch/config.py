"""The section `train.tensorboard`."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from stoker.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorBoardConfig:
    """What TensorBoard shows in addition to loss, metrics and speed."""

    histograms_every_steps: int | None = None
    """Steps between two histograms of every weight. null: once an epoch; 0: never."""

    gradients: bool = True
    """Also histograms of the gradients: one more pass over the same batch each time."""

    graph: bool = True
    """Show the graph of a step."""

    embeddings: dict[str, str | None] = field(default_factory=dict)
    """Embedding layers for the projector, after each epoch: layer -> the vocabulary (an output made
    with it, or its file name) whose terms label the vectors, or null."""

    profile: str | None = None
    """`START:STOP`: the steps to profile, e.g. 20:30."""

    def __post_init__(self) -> None:
        if self.histograms_every_steps is not None and self.histograms_every_steps < 0:
            raise ConfigError(
                "train.tensorboard.histograms_every_steps must be at least 0",
                got=self.histograms_every_steps,
            )
        if self.profile is not None:
            profiled_steps(self.profile)


def profiled_steps(profile: str) -> tuple[int, int]:
    """Return first and last step, from 1, of `START:STOP`.

    Raises:
        ConfigError: It has another form, or contains no step.
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
