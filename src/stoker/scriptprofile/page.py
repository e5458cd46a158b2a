"""The profile of a script as an HTML page."""

from __future__ import annotations

from collections.abc import Iterator

from stoker.measure.device_page import device_section
from stoker.pages.bars import Bar, Span, timeline, waterfall_of_parts
from stoker.pages.html import Html, element, page, paragraph, section
from stoker.pages.numbers import percent, seconds
from stoker.pages.table import Code, Number, Prose, facts, table
from stoker.scriptprofile.loops import FitLoop, Loop, StepSplit
from stoker.scriptprofile.profile import ScriptProfile
from stoker.scriptprofile.rules.finding import ScriptFinding

_ROWS = ("waiting for input", "tf.function", "reading values", "Python")
_ROWS_OF_FIT = ("step and its input", "Keras, callbacks")

SHOWN_STEPS = 40
"""Maximum number of steps in a timeline: with more, they would be too narrow to be visible."""


def page_html(profile: ScriptProfile) -> str:
    """Return the profile as an HTML page."""
    failed = [element("strong", _sentence(profile.ending()))] if profile.failed else []
    note = profile.note()
    parts = [
        *map(paragraph, failed),
        paragraph(_summary(profile), quiet=True),
        *([paragraph(_sentence(note))] if note else []),
        section("Findings", *_findings(profile)),
        section("Machine", facts(profile.machine())),
    ]
    for loop in profile.loops:
        parts += _loop(loop, profile.name_of(loop))
    failures = (element("li", line) for line in profile.failures)
    if profile.failures:
        parts.append(section("The watcher failed", element("ul", *failures)))
    return page(f"Profile of {profile.shown_command()}", parts)


def _sentence(clause: str) -> str:
    return f"{clause[0].upper()}{clause[1:]}."


def _summary(profile: ScriptProfile) -> str:
    versions = f", TensorFlow {profile.tensorflow}" if profile.tensorflow else ""
    gpus = f", {profile.gpus or 'no'} GPU" if profile.loops else ""
    return f"{seconds(profile.wall_s)}, exit code {profile.exit_code}{versions}{gpus}"


def _findings(profile: ScriptProfile) -> Iterator[Html]:
    if profile.loops and not profile.findings:
        yield paragraph(profile.nothing_found())
    yield from map(_finding, profile.findings)
    if profile.minor:
        yield element("h3", "Also seen, but with little effect here")
        rows = (
            [each.kind, str(each.place), each.observation, each.change] for each in profile.minor
        )
        yield table(["finding", Code("line"), Prose("why"), Prose("change")], rows)


def _finding(finding: ScriptFinding) -> Html:
    gain = f"expected: {finding.gain_text()}; {finding.sure}; {finding.place.file}"
    return element(
        "div",
        element("h3", f"{finding.kind} in {finding.place}"),
        paragraph(f"{finding.observation}. {finding.why}"),
        element("pre", finding.change),
        paragraph(gain, quiet=True),
        class_="finding",
    )


def _loop(loop: Loop, where: str) -> Iterator[Html]:
    split = loop.split
    counted = f"{loop.counted()}, {loop.passes} whole passes, {loop.rows or '?'} samples per step"
    yield section(
        where[0].upper() + where[1:],
        paragraph(counted, quiet=True),
        *(_split(loop, split) if split else [paragraph("Too few steps were measured.")]),
        *_stages(loop),
        *_steps(loop),
    )
    yield device_section(loop.device, why=loop.no_device)


def _split(loop: Loop, split: StepSplit) -> Iterator[Html]:
    measures = [f"A {loop.unit} takes {seconds(split.step_s)}"]
    if split.busy is not None:
        measures.append(split.shown_busy())
    if split.input_wait is not None:
        measures.append(f"W {percent(split.input_wait)}")
    yield paragraph(f"{', '.join(measures)}.")
    bars = [
        Bar(label=name, value=part_s, shown=f"{seconds(part_s)}, {percent(part_s / split.step_s)}")
        for name, part_s in split.parts.items()
    ]
    yield waterfall_of_parts(bars, title="parts of a step's time")
    if split.busy is None:
        yield paragraph(f"U was not measured: {split.no_busy}.", quiet=True)
    if split.no_wait:
        yield paragraph(f"W was not measured: {split.no_wait}.", quiet=True)


def _stages(loop: Loop) -> Iterator[Html]:
    rows = [
        [
            cost.name,
            str(cost.place or "added"),
            seconds(cost.cpu_s_per_sample),
            percent(cost.share),
        ]
        for cost in loop.costs
    ]
    if rows:
        yield element("h3", "Input stages, last stage first")
        yield table(["stage", Code("line"), Number("CPU per sample"), Number("share")], rows)


def _steps(loop: Loop) -> Iterator[Html]:
    if len(loop.timeline) < 2:
        return
    # The first two steps compile: they are so long that the others would be invisible.
    shown = loop.timeline[2 : 2 + SHOWN_STEPS] or loop.timeline
    spans = [span for step in shown for span in _spans(loop, step)]
    is_fit = isinstance(loop, FitLoop)
    gaps = " Gaps: an epoch ended, or Stoker ran the step on one batch in memory." if is_fit else ""
    yield element("h3", "The first steps")
    yield paragraph(f"{len(shown)} steps after the two that compile.{gaps}", quiet=True)
    yield timeline(spans, lanes=_ROWS_OF_FIT if is_fit else _ROWS, title="first steps")


def _spans(loop: Loop, step: tuple[float, float, float, float, float]) -> Iterator[Span]:
    begin_s, wait_s, call_s, sync_s, period_s = step
    rest_s = max(0.0, period_s - wait_s - call_s - sync_s)
    if isinstance(loop, FitLoop):
        # Keras's own work for a step comes before the call; the call includes the wait for input.
        yield Span(lane=0, begin_s=begin_s, length_s=call_s)
        yield Span(lane=1, begin_s=begin_s - rest_s, length_s=rest_s)
        return
    for lane, part_s in enumerate((wait_s, call_s, sync_s, rest_s)):
        yield Span(lane=lane, begin_s=begin_s, length_s=part_s)
        begin_s += part_s
