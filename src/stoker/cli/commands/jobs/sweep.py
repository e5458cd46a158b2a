"""`stoker submit --sweep`: submits one job for each combination of values."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import typer

from stoker.cli.output import print_result
from stoker.core.errors import ConfigError

if TYPE_CHECKING:
    from stoker.app.submission import JobRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepOrder:
    """The options of a sweep."""

    on: str
    """Name of the target."""

    sweeps: Sequence[str]
    """Strings of the form `dotted.key=value,value`."""

    at_once: int | None
    """Maximum number of jobs that run at the same time; None: the target decides."""

    dry_run: bool


def submit_sweep(request: JobRequest, order: SweepOrder, *, as_json: bool) -> None:
    """Submit the missing jobs of a sweep, and print what was submitted.

    Raises:
        UserError: a value is invalid, or the target refuses the jobs.
    """
    from stoker.app.experiment import prepare_source
    from stoker.app.submission import prepare_sweep
    from stoker.jobs.overview import EXPERIMENT
    from stoker.jobs.sweep_submission import array_of, require_submittable, submit_sweep
    from stoker.jobs.targets import find_target, read_targets

    if not order.sweeps:
        raise ConfigError(
            "--at-once needs --sweep",
            got=order.at_once,
            fix="E.g. --sweep train.epochs=3,5 --at-once 2.",
        )
    loaded, sweep, jobs, archive = prepare_sweep(request, order.sweeps)
    targets = read_targets(loaded.targets, file=loaded.folder / EXPERIMENT)
    target = find_target(order.on, targets)
    array = array_of(sweep, jobs, at_once=order.at_once)
    require_submittable(array, target=target, targets=targets)
    facts = {"sweep": sweep.id, "target": order.on, "elements": list(map(asdict, sweep.elements))}
    if order.dry_run:
        if as_json:
            print_result(json.dumps(facts | {"submitted": [], "code": archive.sizes}))
            return
        print_result(f"sweep {sweep.id} could be submitted to {order.on}; nothing was written")
        for number, element in enumerate(sweep.elements):
            print_result(f"  {number}  {element.job}  {' '.join(element.settings)}")
        return
    prepare_source(loaded, lambda line: typer.echo(line, err=True))
    receipt = submit_sweep(
        sweep, jobs, archive, at_once=order.at_once, target=target, targets=targets
    )
    if as_json:
        print_result(json.dumps(facts | asdict(receipt)))
        return
    counts = f"{len(receipt.submitted)} of {len(jobs)} jobs submitted to {order.on}"
    print_result(f"sweep {sweep.id}: {counts}")
    if receipt.live or receipt.done:
        print_result(f"{len(receipt.live)} wait or run already, {len(receipt.done)} are done")
    print_result(f"state: stoker jobs show {sweep.id}; end it: stoker stop {sweep.id}")
