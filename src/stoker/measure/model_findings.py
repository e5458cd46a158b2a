"""Avoidable costs in a model itself, by its layers."""

from __future__ import annotations

from collections.abc import Sequence

from stoker.core.errors import Finding

NAMED = 3
"""Layers that are named in the message; others are only counted."""


def useless_bias(
    names: Sequence[str], *, parameters: int, of_parameters: int, count: int | None = None
) -> Finding:
    """The finding about biases that have no effect.

    Args:
        names: Names of their layers, at least one.
        parameters: Number of parameters in these biases.
        of_parameters: Number of parameters in the whole model.
        count: Number of these layers, if not all are named.
    """
    count = len(names) if count is None else count
    rest = count - len(names[:NAMED])
    named = ", ".join(names[:NAMED]) + (f" and {rest} more" if rest else "")
    has = "layer has a bias" if count == 1 else "layers have a bias"
    return Finding(
        kind="useless_bias",
        severity="warning",
        message=f"{count} {has} that the next layer, a BatchNormalization, cancels: {named} "
        f"({parameters:,} of {of_parameters:,} parameters, {parameters / max(1, of_parameters):.2%}; "
        "the time was not measured)",
        fix="Pass use_bias=False to these layers: a step then needs neither the addition over their "
        "output nor the sum over it for a gradient that is zero.",
    )
