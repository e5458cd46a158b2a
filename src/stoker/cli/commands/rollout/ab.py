"""`stoker rollout ab|outcome|result`: A/B tests, which compare versions by what their users did (outcomes)."""

from __future__ import annotations

import json
import math
import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.cli.options import AsJson

if TYPE_CHECKING:
    from stoker.rollout.ab.result import ABResult, ArmResult
    from stoker.rollout.state.ab_settings import ABTestSettings
    from stoker.rollout.state.state import RolloutState

Model = Annotated[str, typer.Argument(help="The model's name in the repository.")]
Models = Annotated[
    Path, typer.Option("--models", help="The model repository: <model>/<version>/ folders.")
]
ServerMemory = Annotated[
    float,
    typer.Option(
        "--server-memory",
        metavar="GIB",
        min=0.0,
        help="Memory of a server, which must hold all versions. Default: the memory of this machine or container.",
    ),
]
MODELS = Path("models")


def server_bytes(gib: float) -> int | None:
    """Convert `--server-memory` to bytes; None if it was left out.

    Raises:
        ConfigError: the number is not finite.
    """
    from stoker.core.errors import ConfigError

    if not 0.0 <= gib < math.inf:
        raise ConfigError("--server-memory must be a number of GiB", got=gib)
    return int(gib * 2**30) or None


def ab(
    model: Model,
    arms: Annotated[
        str,
        typer.Option(
            "--arms",
            metavar="VERSION=PERCENT,...",
            help="Two or more versions, each with its percentage of the users: 5=50,6=30,7=20.",
        ),
    ],
    key: Annotated[
        str,
        typer.Option(
            "--key",
            help="Header, gRPC metadata key or cookie:NAME that identifies the user. Requests without it go to "
            "the baseline and are not counted.",
        ),
    ],
    models: Models = MODELS,
    baseline: Annotated[
        int | None,
        typer.Option(
            "--baseline",
            help="Version that the others are compared with. Default: the first in --arms.",
        ),
    ] = None,
    metric: Annotated[
        str,
        typer.Option(
            "--metric",
            help="How a user's outcomes become one number: first (the first outcome) or sum (the sum of all outcomes).",
        ),
    ] = "first",
    max_value: Annotated[
        float | None,
        typer.Option(
            "--max-value",
            help="Largest accepted outcome; the smallest is 0. Default: any number is accepted; the result then "
            "needs 100 nonzero outcomes in each arm instead of 50.",
        ),
    ] = None,
    alpha: Annotated[
        float,
        typer.Option(
            "--alpha",
            help="Probability that any of the reported intervals ever misses the true difference.",
        ),
    ] = 0.05,
    max_keys: Annotated[
        int, typer.Option("--max-keys", min=1, help="Maximum number of users that are recorded.")
    ] = 1_000_000,
    server_memory: ServerMemory = 0.0,
    why: Annotated[str, typer.Option("--why", help="Reason to record in the history.")] = "",
    as_json: AsJson = False,
) -> None:
    """Begin an A/B test: each user is assigned to a version and keeps it.

    It ends with `stoker rollout promote --version N` or `stoker rollout rollback`.
    """
    from stoker.app.import_tensorflow import import_tensorflow
    from stoker.core.errors import ConfigError
    from stoker.rollout.ab_tests import ABTests
    from stoker.rollout.operations import ModelRollouts
    from stoker.rollout.state.ab_settings import ABTestSettings, Metric, parse_arms
    from stoker.rollout.state.settings import RolloutSettings

    if metric not in [*Metric]:
        raise ConfigError("--metric must be first or sum", got=metric)
    split = parse_arms(arms)
    test = ABTestSettings(
        arms=split,
        baseline=split[0][0] if baseline is None else baseline,
        salt=secrets.token_hex(16),
        metric=Metric(metric),
        max_value=max_value,
        alpha=alpha,
        max_keys=max_keys,
    )
    rollouts, memory = ModelRollouts(models, model), server_bytes(server_memory)
    import_tensorflow()
    state = ABTests(rollouts).start(test, RolloutSettings(key=key), why=why, server_bytes=memory)
    typer.echo(json.dumps(state.to_json(), indent=2) if as_json else summary(state))


def outcome(
    model: Model,
    key: Annotated[
        str, typer.Option("--key", help="The user: the value of the test's header or cookie.")
    ],
    value: Annotated[float, typer.Option("--value", help="Outcome: 1 or 0, or an amount.")],
    models: Models = MODELS,
) -> None:
    """Report the outcome of a user who took part in the model's A/B test."""
    from stoker.rollout.ab.outcomes import Outcome
    from stoker.rollout.ab_tests import ABTests
    from stoker.rollout.operations import ModelRollouts

    ABTests(ModelRollouts(models, model)).add_outcome(Outcome(key=key, value=value))


def result(model: Model, models: Models = MODELS, as_json: AsJson = False) -> None:
    """Show each arm's users and mean outcome, and its difference from the baseline; valid at any time."""
    from stoker.rollout.ab_tests import ABTests
    from stoker.rollout.operations import ModelRollouts

    state, test, found = ABTests(ModelRollouts(models, model)).result()
    if as_json:
        typer.echo(json.dumps(found.to_json(state, test), indent=2))
        return
    for line in _lines(state, test, found):
        typer.echo(line)


def summary(state: RolloutState) -> str:
    """Return one line about a running test."""
    shares = ", ".join(f"version {version} {share:.4%}" for version, share in state.arms.items())
    return f"A/B test of {shares.replace('.0000', '')}; baseline version {state.baseline}"


_ROW = "{:>8} {:>7} {:>10} {:>12} {:>12}  {}"


def _lines(state: RolloutState, test: ABTestSettings, found: ABResult) -> list[str]:
    days = (time.time() - state.began_s) / 86_400
    when = f"under way for {days:.1f} days" if state.is_test else f"over ({state.phase})"
    counts = "the sum of the outcomes" if test.metric == "sum" else "the first outcome"
    lines = [
        f"A/B test, rollout {state.rollout}, {when}; of each user {counts} counts",
        _ROW.format(
            "version", "weight", "users", "reported", "mean", "difference from the baseline"
        ),
    ]
    lines += [
        _ROW.format(
            arm.version,
            f"{arm.share:.4g}",
            f"{arm.totals.keys:,}",
            f"{arm.reported:,}",
            f"{arm.totals.mean:.6g}" if arm.totals.keys else "-",
            _difference(arm),
        )
        for arm in found.arms
    ]
    return lines + [f"warning: {warning}" for warning in found.warnings]


def _difference(arm: ArmResult) -> str:
    found = arm.difference
    if found is None:
        return arm.verdict
    return f"{found.estimate:+.4g} [{found.low:+.4g}, {found.high:+.4g}], {arm.verdict}"
