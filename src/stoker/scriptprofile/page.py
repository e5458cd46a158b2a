"""`profile.html`: one file, no script, nothing loaded; every text of the user's is escaped."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from stoker.scriptprofile.observations import Loop
from stoker.scriptprofile.profile import ScriptProfile
from stoker.scriptprofile.rules.finding import ScriptFinding
from stoker.scriptprofile.split import StepSplit, split_step, stage_costs
from stoker.tune.device_page import device_section
from stoker.tune.drawing import Bar, Span, seconds, timeline, waterfall_of_parts
from stoker.tune.page import page, table

_LANES = ("waiting for input", "tf.function", "reading values", "Python")
_LANES_OF_FIT = ("step and its input", "Keras, callbacks")

SHOWN_STEPS = 40
"""Steps of a timeline: more are too narrow to be seen."""


def page_html(profile: ScriptProfile) -> str:
    """The profile as a page."""
    title = f"Profile of {profile.shown_command()}"
    parts = (
        [f"<p><strong>{escape(_sentence(profile.ending()))}</strong></p>"] if profile.failed else []
    )
    parts.append(f'<p class="sub">{escape(_summary(profile))}</p>')
    if note := profile.note():
        parts.append(f"<p>{escape(_sentence(note))}</p>")
    parts += [table(["", ""], map(list, profile.machine()))] if profile.machine() else []
    parts += [
        _findings(profile),
        _minor(profile),
        *(_loop(loop, profile.name_of(loop)) for loop in profile.loops),
        _failures(profile),
    ]
    return page(title, parts)


def _sentence(clause: str) -> str:
    return f"{clause[0].upper()}{clause[1:]}."


def _summary(profile: ScriptProfile) -> str:
    versions = f", TensorFlow {profile.tensorflow}" if profile.tensorflow else ""
    gpus = f", {profile.gpus or 'no'} GPU" if profile.loops else ""
    return f"{seconds(profile.wall_s)}, exit code {profile.exit_code}{versions}{gpus}"


def _findings(profile: ScriptProfile) -> str:
    if not profile.loops:
        return ""
    if not profile.findings:
        return f"<h2>Findings</h2>\n<p>{profile.nothing_found()}</p>"
    return "<h2>Findings</h2>\n" + "\n".join(map(_finding, profile.findings))


def _minor(profile: ScriptProfile) -> str:
    if not profile.minor:
        return ""
    rows = ([each.kind, str(each.place), each.seen, each.change] for each in profile.minor)
    return "<h3>Seen too, of less weight here</h3>\n" + table(["", "line", "why", "change"], rows)


def _finding(finding: ScriptFinding) -> str:
    return (
        f"<section><h3>{escape(finding.kind)} in {escape(str(finding.place))}</h3>\n"
        f"<p>{escape(finding.seen)}. {escape(finding.why)}</p>\n"
        f"<pre>{escape(finding.change)}</pre>\n"
        f'<p class="sub">expected: {escape(finding.gain_text())}; {finding.sure}; '
        f"{escape(finding.place.file)}</p></section>"
    )


def _loop(loop: Loop, where: str) -> str:
    split = split_step(loop)
    sub = f"{loop.counted()}, {loop.passes} whole passes, {loop.rows or '?'} samples a step"
    parts = [
        f"<h2>{escape(where[0].upper() + where[1:])}</h2>",
        f'<p class="sub">{escape(sub)}</p>',
    ]
    if split is None:
        parts.append("<p>Too few steps were measured.</p>")
    else:
        parts += _split(loop, split)
    parts.append(device_section(loop.device, why=loop.no_device))
    parts += [_stages(loop), _steps(loop)]
    return "\n".join(part for part in parts if part)


def _split(loop: Loop, split: StepSplit) -> Iterator[str]:
    what = "call" if loop.kind == "inside" and not loop.rounds else "step"
    said = [f"a {what} takes {seconds(split.step_s)}"]
    if split.busy is not None:
        said.append(split.shown_busy())
    if split.input_wait is not None:
        said.append(f"W {split.input_wait:.1%}")
    yield f"<p>{escape(', '.join(said))}.</p>"
    bars = [
        Bar(label=name, value=part_s, shown=f"{seconds(part_s)}, {part_s / split.step_s:.0%}")
        for name, part_s in split.parts.items()
    ]
    yield waterfall_of_parts(bars, title="where a step's time goes")
    if split.busy is None:
        yield f'<p class="sub">U was not measured: {escape(split.no_busy)}.</p>'
    if split.no_wait:
        yield f'<p class="sub">W was not measured: {escape(split.no_wait)}.</p>'


def _stages(loop: Loop) -> str:
    rows = "\n".join(
        f"<tr><td>{escape(cost.name)}</td><td>{escape(str(cost.place or 'added'))}</td>"
        f'<td class="n">{seconds(cost.cpu_s_per_sample)}</td><td class="n">{cost.share:.0%}</td></tr>'
        for cost in stage_costs(loop)
    )
    if not rows:
        return ""
    return (
        "<h3>Input stages, last one first</h3>\n<table><tr><th>stage</th><th>line</th>"
        f'<th class="n">CPU a sample</th><th class="n">share</th></tr>\n{rows}</table>'
    )


def _steps(loop: Loop) -> str:
    if len(loop.timeline) < 2:
        return ""
    # The first steps compile, and would leave no room for the others.
    shown = loop.timeline[2 : 2 + SHOWN_STEPS] or loop.timeline
    spans = [span for step in shown for span in _spans(loop, step)]
    drawn = timeline(
        spans, lanes=_LANES_OF_FIT if loop.kind == "fit" else _LANES, title="first steps"
    )
    gaps = " Where nothing is drawn an epoch ended, or Stoker ran the step on a resident batch."
    note = gaps if loop.kind == "fit" else ""
    return (
        f'<h3>The first steps</h3>\n<p class="sub">{len(shown)} steps after the two that compile.'
        f"{note}</p>\n{drawn}"
    )


def _spans(loop: Loop, step: tuple[float, float, float, float, float]) -> Iterator[Span]:
    begin_s, wait_s, call_s, sync_s, period_s = step
    rest_s = max(0.0, period_s - wait_s - call_s - sync_s)
    if loop.kind == "fit":
        # What Keras does for a step comes before the call, and its input inside of it.
        yield Span(lane=0, begin_s=begin_s, length_s=call_s)
        yield Span(lane=1, begin_s=begin_s - rest_s, length_s=rest_s)
        return
    for lane, part_s in enumerate((wait_s, call_s, sync_s, rest_s)):
        yield Span(lane=lane, begin_s=begin_s, length_s=part_s)
        begin_s += part_s


def _failures(profile: ScriptProfile) -> str:
    if not profile.failures:
        return ""
    lines = "".join(f"<li>{escape(line)}</li>" for line in profile.failures)
    return f"<h2>The watcher failed</h2>\n<ul>{lines}</ul>"
