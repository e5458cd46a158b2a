"""Which version answers a request that names none: what the server asks of a rollout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

Headers = Callable[[str], bytes | None]
"""Gives the value of a header or metadata key, whose name is in lower case; None if the request has none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """Where a request goes."""

    version: int
    """The version that answers."""

    key: int | None = None
    """Hash of the key that the version was chosen by."""

    counts: bool = True
    """Whether the answer counts: a request without the key that others have does not."""


class Router(Protocol):
    """Sends requests to versions, and hears how they were answered; may be used by many threads."""

    def route(self, model: str, headers: Headers) -> Route | None:
        """The version for a request that names none; None: the newest."""

    def wanted(self, model: str) -> set[int] | None:
        """The versions that must be loaded; None: those of the model's policy."""

    def answered(
        self,
        model: str,
        route: Route,
        *,
        good: bool,
        took_s: float,
        outputs: Mapping[str, np.ndarray[Any, Any]] | None,
    ) -> None:
        """Count an answer.

        Args:
            model: the model.
            route: where the request went.
            good: whether it was answered in time, with a status of success.
            took_s: its duration, seconds.
            outputs: output name -> array; None if there are none.
        """

    def refresh(self, bases: Mapping[str, Path]) -> None:
        """Read what has changed, and write what was counted; the server calls it every second.

        Args:
            bases: model -> the folder of its versions.
        """
