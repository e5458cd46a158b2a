"""Where a training's wall time went: its own account if it has one, else measured from outside."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from situation import Situation
from timeline import ONE_TIME_EPOCHS, Timeline

FIVE_MINUTES_S, LONG_S = 300.0, 90.0


def read(text: str) -> dict[str, Any]:
    """The JSON in a command's output; text before it is ignored."""
    found: dict[str, Any] = json.loads(text[text.index("{") :])
    return found


def show(at: Situation, line: Timeline, found: Mapping[str, Any]) -> None:
    """Figures of the time outside steps."""
    steady, first_s = line.steady(), line.until_first_step_s(batch=at.sizes.batch)
    if steady is None or first_s is None or "ended_at" not in found:
        how = "the training made too few steps, or had no end in its time"
        at.add("time that is not steps", None, "s", how=how)
        return
    took_s = found["ended_at"] - line.began_at
    step_s = found["step_time_s"]
    steps_s = found["steps"] * step_s
    per_epoch = line.epoch_share(found)
    fixed_s = took_s - steps_s - per_epoch * (took_s - first_s)
    how = (
        f"one process of {took_s:.3g} s and {found['epochs']} epochs, seen from outside: "
        f"{found['steps']} steps of {1000 * step_s:.4g} ms"
    )
    at.add("time that is not steps, in the whole training", took_s - steps_s, "s", how=how)
    ninety_s = fixed_s + per_epoch * (LONG_S - fixed_s)
    at.add(
        "time that is not steps, in a training of 90 s",
        ninety_s,
        "s",
        at_most=20.0,
        how=f"computed: start and end {fixed_s:.3g} s, and {per_epoch:.2%} of the rest; {how}",
    )
    at.add(
        "time that is not steps, in each further epoch",
        100 * per_epoch,
        "%",
        at_most=2.0,
        how=f"1 - steps over wall, from the end of epoch {ONE_TIME_EPOCHS} to that of the last",
    )
    share = (FIVE_MINUTES_S - fixed_s) * (1 - per_epoch) / FIVE_MINUTES_S
    at.add(
        "goodput in five minutes",
        100 * share,
        "%",
        at_least=90.0,
        how="computed from the two above",
    )
    for name, (value, unit) in account(found).items():
        at.add(f"by the training's own account: {name}", value, unit, how="stoker train --json")
    # The part's log comes back from a rented machine; the run's folder does not.
    device_figures = {name: value for name, value in found.items() if name.startswith("device_")}
    sys.stdout.write(json.dumps(device_figures | {"xla": found.get("xla")}) + "\n")


def account(found: Mapping[str, Any]) -> dict[str, tuple[float, str]]:
    """The result's figures on its wall time and device time, if this version reports them."""
    facts: dict[str, tuple[float, str]] = {}
    if isinstance(found.get("goodput"), int | float):
        facts["goodput"] = 100 * found["goodput"], "%"
    for name, seconds in _numbers(found.get("wall_time")).items():
        facts[f"{name}, wall time"] = seconds, "s"
    if isinstance(found.get("mfu"), int | float):
        facts["MFU"] = 100 * found["mfu"], "%"
    device = found.get("device_time")
    for name, share in _numbers(
        device.get("shares") if isinstance(device, Mapping) else None
    ).items():
        facts[f"device time, {name}"] = 100 * share, "%"
    return facts


def _numbers(found: Any) -> dict[str, float]:
    """The numbers in a mapping and in nested ones one level down."""
    if not isinstance(found, Mapping):
        return {}
    flat: dict[str, float] = {}
    for name, value in found.items():
        if isinstance(value, Mapping):
            flat |= _numbers(value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            flat[name] = float(value)
    return flat
