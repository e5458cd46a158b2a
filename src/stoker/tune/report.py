"""The report of a tuning: from first to last, lever by lever, and what was tried and reverted."""

from __future__ import annotations

from stoker.pages.bars import Bar, waterfall, waterfall_of_parts
from stoker.pages.html import Html, badge, page, paragraph, section
from stoker.pages.numbers import percent, seconds
from stoker.pages.table import Number, Prose, table
from stoker.tune.profile import PARTS, Profile, Split
from stoker.tune.search import Outcome, Tuned


def report(tuned: Tuned, *, name: str, usd_per_hour: float | None) -> str:
    """The page.

    Args:
        tuned: What was found.
        name: The experiment's.
        usd_per_hour: What the machine costs, where that is known.
    """
    gain = tuned.after.samples_per_s / tuned.before.samples_per_s
    return page(
        f"Tuning of {name}",
        [
            paragraph(
                f"{gain:.2f} times the samples a second, measured in {seconds(tuned.took_s)}. "
                f"Tuning ended because {tuned.ended}."
            ),
            section("From first to last", steps_of(tuned), _figures(tuned, usd_per_hour)),
            section(
                "What was found",
                paragraph(f"Before: {tuned.diagnosis_before.text}"),
                paragraph(f"After: {tuned.diagnosis_after.text}"),
            ),
            section(
                "What was tried",
                table(
                    ["lever", "decision", Prose("why"), Number("took")],
                    map(_outcome, tuned.outcomes),
                )
                or paragraph("Nothing."),
                paragraph(
                    f"Two processes with the same settings differed by {tuned.noise.shown()}. A gain "
                    "counts if the interval of its median, over pairs of windows measured in turn, is "
                    "above that and above 5 %. All samples are in ledger.jsonl next to this page.",
                    quiet=True,
                ),
            ),
            section("A step before", parts_of_a_step(tuned.before.split, title="a step before")),
            section("A step after", parts_of_a_step(tuned.after.split, title="a step after")),
        ],
    )


def parts_of_a_step(split: Split, *, title: str) -> Html:
    """A waterfall: each part of a step from where the one before it ends."""
    bars = [
        Bar(
            label=PARTS[part],
            value=share,
            shown=f"{seconds(share * split.step_s)}, {percent(share)}",
        )
        for part, share in split.shares().items()
    ]
    return waterfall_of_parts(bars, title=title)


def steps_of(tuned: Tuned) -> Html:
    """The waterfall: samples a second, from the experiment as it was to what was kept."""
    before = tuned.before.samples_per_s
    rises = [Bar(label="as it was", value=before, shown=_said(tuned.before))]
    reached = before
    for outcome in tuned.outcomes:
        if outcome.decision != "kept":
            continue
        reached *= outcome.gain.ratio
        rises.append(Bar(label=outcome.lever, value=reached, shown=outcome.gain.shown()))
    rises.append(Bar(label="tuned", value=tuned.after.samples_per_s, shown=_said(tuned.after)))
    return waterfall(rises, title="samples a second, lever by lever")


def _said(profile: Profile) -> str:
    return f"{profile.samples_per_s:,.0f} samples/s, U {min(1.0, profile.busy_fraction):.0%}"


def _outcome(outcome: Outcome) -> list[str]:
    decision = badge(outcome.decision, kind="good" if outcome.decision == "kept" else "quiet")
    return [outcome.lever, decision, outcome.why, seconds(outcome.took_s)]


def _figures(tuned: Tuned, usd_per_hour: float | None) -> Html:
    before, after = tuned.before, tuned.after
    rows = [
        ["U, busy fraction", f"{before.busy_fraction:.1%}", f"{after.busy_fraction:.1%}"],
        ["W, input wait", f"{before.input_wait:.1%}", f"{after.input_wait:.1%}"],
        ["samples a second", f"{before.samples_per_s:,.0f}", f"{after.samples_per_s:,.0f}"],
        ["an epoch's steps", seconds(before.epoch_s), seconds(after.epoch_s)],
    ]
    if usd_per_hour is not None:
        costs = [f"{each.epoch_s * usd_per_hour / 3600:.4g} USD" for each in (before, after)]
        rows.append(["an epoch's cost", *costs])
    return table(["", Number("before"), Number("after")], rows)
