"""What `stoker train --dry-run` prints."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from stoker.app.dry_run import Rehearsal, Steps


def print_rehearsal(console: Console, rehearsal: Rehearsal) -> None:
    """Settings, placement, memory, and that the model can be served."""
    steps, served = rehearsal.steps, rehearsal.served
    console.print(_facts(steps))
    console.print()
    console.print(_placement(steps))
    console.print()
    console.print(_memory(steps))
    console.print()
    asked = " and ".join(served.signatures)
    console.print(
        f"served: untrained, {shown_bytes(served.size_bytes)} on the disk, one row answered by "
        f"{escape(asked)}: {escape(', '.join(served.outputs))}",
        soft_wrap=True,
    )


def _facts(steps: Steps) -> Table:
    resolved = steps.resolved
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bold")
    facts.add_column(overflow="fold")
    replicas = f"{resolved.replicas} replica{'s' * (resolved.replicas > 1)}"
    facts.add_row("strategy", f"{resolved.strategy}, {replicas}: {resolved.why['strategy']}")
    facts.add_row(
        "batch",
        f"{resolved.batch_size} x {resolved.accumulate} passes x {replicas} = "
        f"{resolved.global_batch} samples a step",
    )
    trial = ", tried while the run trains" if resolved.xla_trial else ""
    facts.add_row(
        "precision", f"{resolved.precision}, XLA {'on' if resolved.xla else 'off'}{trial}"
    )
    first, second = steps.losses
    facts.add_row(
        "two steps",
        f"loss {first:.4g}, {second:.4g}; {steps.first_step_s:.1f} s to compile and run the first, "
        f"{1e3 * steps.second_step_s:.3g} ms the second",
    )
    return facts


def _placement(steps: Steps) -> Table:
    table = Table(title="device placement", title_justify="left", title_style="bold")
    table.add_column("device")
    table.add_column("variables", justify="right")
    table.add_column("bytes", justify="right")
    table.add_column("operations", justify="right")
    table.add_column("most frequent", overflow="fold")
    for placed in steps.placed:
        table.add_row(
            escape(placed.device),
            f"{placed.variables:,}",
            shown_bytes(placed.variables_bytes),
            f"{placed.operations:,}",
            escape(", ".join(placed.kinds)),
        )
    return table


def _memory(steps: Steps) -> Table:
    footprint = steps.footprint
    table = Table(title="memory of a replica", title_justify="left", title_style="bold")
    table.add_column("what")
    table.add_column("bytes", justify="right")
    table.add_column("of it", overflow="fold")
    fixed = footprint.parameters - footprint.trainable
    numbers = f"{footprint.trainable:,} trainable parameters, {fixed:,} others"
    table.add_row("weights", shown_bytes(footprint.weights_bytes), numbers)
    table.add_row("gradients", shown_bytes(footprint.gradients_bytes), "")
    table.add_row("optimizer", shown_bytes(footprint.optimizer_bytes), "")
    largest = ", ".join(f"{name} {shown_bytes(size)}" for name, size in footprint.largest[:3])
    estimate = shown_bytes(footprint.activations_bytes)
    table.add_row("activations (estimate)", estimate, escape(largest))
    table.add_row("together", shown_bytes(footprint.total_bytes), "")
    for device, peak in steps.peak_bytes.items():
        table.add_row(f"{device}: TensorFlow's peak", shown_bytes(peak), "")
    return table


def shown_bytes(size: float) -> str:
    """`512 B`, `1.5 KiB`, `20.3 MiB` ..."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
