"""The wall time of a whole script: its parts, and findings about those that are not training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from stoker.scriptprofile.observations import Loop, Seen, WallPart
from stoker.scriptprofile.rules.finding import ScriptFinding
from stoker.scriptprofile.rules.first_pass import filling_s, first_pass_findings

LEAST_PART = 0.10
"""From this share of the time without imports, a part is a finding."""

LEAST_WALL_S, LEAST_CPU_S, LONG_S = 2.0, 1.0, 10.0
"""It also needs this many seconds on both clocks, or this long: load makes short parts long."""

LEAST_LOOP = 0.05
"""Share of a script's time without imports: loops that take less get no advice about speed."""

MANY_CALLS = 20
"""From this number of calls of `predict`, each one costs more than its rows."""

NAMES = {
    "imports": "imports",
    "training": "training",
    "first_pass": "the first pass, which fills a cache",
    "validation": "validation",
    "evaluate": "evaluate",
    "predict": "predict",
    "callbacks": "callbacks between epochs",
    "saving": "saving",
    "measuring": "measuring by Stoker",
    "rest": "the script's own code, and waiting",
}
"""Part -> label for the user."""


def wall_time(seen: Seen) -> Mapping[str, float]:
    """Part of the process's time -> seconds, the largest first; empty if unknown.

    They add up to the time from the process's start to its last report.
    """
    if seen.since_start_s <= 0:
        return {}
    found: dict[str, float] = {}
    for part in seen.wall_parts:
        name = "training" if part.kind == "fit" else part.kind
        found[name] = found.get(name, 0.0) + max(0.0, part.wall_s)
    for loop in seen.loops:
        found["measuring"] = found.get("measuring", 0.0) + loop.ours_s
        if loop.kind == "fit":
            found["training"] = max(0.0, found.get("training", 0.0) - loop.ours_s)
        else:
            found["training"] = found.get("training", 0.0) + loop.first_s + loop.period_s
        filled_s = min(filling_s(loop), found["training"])
        if filled_s > 0:
            found["training"] -= filled_s
            found["first_pass"] = found.get("first_pass", 0.0) + filled_s
    found["rest"] = max(0.0, seen.since_start_s - sum(found.values()))
    return dict(sorted(found.items(), key=lambda each: -each[1]))


def share_of_script(loop: Loop, seen: Seen) -> float:
    """What a line that trains takes of the script's time without imports, in [0, 1]; 1 if unknown."""
    parts = wall_time(seen)
    base_s = sum(parts.values()) - parts.get("imports", 0.0)
    fits = sum(part.wall_s for part in seen.wall_parts if part.place == loop.place)
    whole_s = fits if loop.kind == "fit" else loop.first_s + loop.period_s
    return min(1.0, whole_s / base_s) if base_s > 0 else 1.0


def wall_findings(seen: Seen) -> Iterator[ScriptFinding]:
    """Parts of a script's time, other than training, that take much of it."""
    parts = wall_time(seen)
    base_s = sum(parts.values()) - parts.get("imports", 0.0)
    for part in seen.wall_parts:
        share = part.wall_s / base_s if base_s > 0 else 0.0
        is_long = part.cpu_s >= LEAST_CPU_S or part.wall_s >= LONG_S
        if (
            part.kind not in _SAID
            or share < LEAST_PART
            or part.wall_s < LEAST_WALL_S
            or not is_long
        ):
            continue
        what, why, change = _SAID[part.kind]
        if part.kind == "predict" and part.calls >= MANY_CALLS:
            why, change = _MANY
        times = "once" if part.calls == 1 else f"in {part.calls:,} calls"
        yield ScriptFinding(
            kind=f"slow_{part.kind}",
            place=part.place,
            seen=f"{what} takes {share:.0%} of the script's time without imports "
            f"({part.wall_s:.3g} s {times})",
            why=why,
            change=change,
            gain=(1.0, min(20.0, 1.0 / max(0.05, 1.0 - share))),
            sure="measured",
        )
    for loop in seen.loops:
        filled_s = filling_s(loop)
        if filled_s >= LEAST_PART * base_s and filled_s * _alone(loop) >= LEAST_WALL_S:
            share = min(1.0, filled_s / base_s)
            yield from first_pass_findings(loop, seconds=filled_s, share=share)


def _alone(loop: Loop) -> float:
    """The share of a first pass that would have passed on a machine without other programs."""
    return 1.0 if loop.first_pass is None else 1.0 - loop.first_pass.away


_SAID = {
    "validation": (
        "validation",
        "No step is trained meanwhile.",
        "Cache its data, take a part of it (validation_steps), or do it less often (validation_freq).",
    ),
    "evaluate": (
        "evaluate",
        "It runs its input pipeline again, without the caches that `fit` may have.",
        "Use a larger batch_size, and cache what its dataset computes.",
    ),
    "predict": (
        "predict",
        "It runs its input pipeline again, and gathers all outputs on the host.",
        "Use a larger batch_size, or predict less often.",
    ),
    "callbacks": (
        "what callbacks do between epochs",
        "No step is trained meanwhile.",
        "Do it less often (if epoch % 5 == 0), on less data, or after the training.",
    ),
    "saving": (
        "saving",
        "No step is trained meanwhile.",
        "Save less often, or weights only: ModelCheckpoint(save_best_only=True, save_weights_only=True)",
    ),
}
"""Kind of a part -> its name, why it is slow, what to do."""

_MANY = (
    "Each call builds an iterator and a dataset, which costs milliseconds whatever it predicts.",
    "Gather the rows and call model.predict(rows) once, or model(rows, training=False) for a few.",
)


def told_parts(seen: Seen) -> list[tuple[str, float]]:
    """Label and share of each part, for the user; parts below one percent are left out."""
    parts = wall_time(seen)
    whole_s = sum(parts.values())
    shares = [(NAMES.get(name, name), value / whole_s) for name, value in parts.items() if whole_s]
    return [(name, share) for name, share in shares if share >= 0.01]


def parts_json(seen: Seen) -> list[dict[str, object]]:
    """For profile.json: the lines that took part of the time."""
    return [_json(part) for part in sorted(seen.wall_parts, key=lambda each: -each.wall_s)]


def _json(part: WallPart) -> dict[str, object]:
    return {
        "kind": part.kind,
        "file": part.place.file,
        "line": part.place.line,
        "wall_s": part.wall_s,
        "cpu_s": part.cpu_s,
        "calls": part.calls,
    }
