"""The file of gates: what it may say, and what is refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.rollout.test_rollout_operations import saved_model

from stoker.core.errors import ConfigError, UserError
from stoker.registry.repository import Repository
from stoker.rollout.operations import ModelRollouts
from stoker.rollout.state.changes import start
from stoker.rollout.state.settings import RolloutSettings
from stoker.rollout.state.state import RolloutState, state_of
from stoker.rollout.state.user_gates import UserGate, read_gates, with_code
from stoker.rollout.state.webhook import Webhook, parse_webhook

FILE = """
errors:
  prometheus: http://prometheus:9090
  query: sum(rate(errors_total{version="${candidate}", model="${model}"}[1m])) / ${baseline}
  max: 0.05
margin: {python: "checks:margin", min: 0.2, every_s: 60}
"""


def read(folder: Path, text: str) -> tuple[UserGate, ...]:
    path = folder / "gates.yaml"
    path.write_text(text)
    return read_gates(path)


def test_a_file_of_gates_and_a_query_about_the_versions(tmp_path: Path) -> None:
    errors, margin = read(tmp_path, FILE)

    assert (errors.max, errors.min, errors.every_s) == (0.05, None, 10.0)
    assert margin == UserGate(name="margin", python="checks:margin", min=0.2, every_s=60.0)
    query = errors.question(model="taxi", candidate=7, baseline=6)
    assert query == 'sum(rate(errors_total{version="7", model="taxi"}[1m])) / 6'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: 5", "a must be a section"),
        ("Errors: {python: 'a:b'}", "must be lower-case letters"),
        ("a: {max: 5}", "gate a must have prometheus and query, or python"),
        ("a: {prometheus: 'http://p', max: 5}", "must have prometheus and query, or python"),
        ("a: {prometheus: p, query: up, max: 5}", "prometheus of gate a must be a URL"),
        ("a: {prometheus: 'http://p', query: up}", "gate a must have min or max"),
        ("a: {python: checks}", "python of gate a must be MODULE:FUNCTION"),
        ("a: {python: 'a:b', min: 2, max: 1}", "gate a must have min <= max"),
        ("a: {python: 'a:b', max: .inf}", "gate a must have min <= max"),
        ("a: {python: 'a:b', timeout_s: 0}", "timeout_s of gate a must lie in 0.1..3600"),
        ("a: {python: 'a:b', maximum: 1}", "a.maximum is not a setting"),
        ("a: {python: 'a:b', code: x}", "must not set name or code"),
    ],
)
def test_a_gate_of_another_form_is_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read(tmp_path, text)
    with pytest.raises(ConfigError, match="The file of gates must exist"):
        read_gates(tmp_path / "none.yaml")


def test_the_settings_of_a_rollout_are_its_state(tmp_path: Path) -> None:
    settings = RolloutSettings(
        user_gates=read(tmp_path, FILE),
        webhooks=(parse_webhook("stage,end=https://host/hook"),),
        notify=("env:SLACK",),
        dry_run=("margin",),
        strict=True,
    )
    state = start(None, 2, serving=1, settings=settings, now_s=5.0)

    assert state_of(state.to_json()) == state
    assert state.settings.webhooks == (Webhook(url="https://host/hook", at=("stage", "end")),)


@pytest.mark.parametrize("text", ["ftp://host", "stage", "never=https://host"])
def test_a_webhook_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"must be a URL|is not a moment"):
        parse_webhook(text)
    with pytest.raises(ConfigError, match="A notification must be a URL"):
        RolloutSettings(notify=("slack",))


@pytest.fixture
def rollouts(tmp_path: Path) -> ModelRollouts:
    repository = Repository(tmp_path / "models")
    for noise in "ab":
        repository.push(saved_model(tmp_path / noise, noise=noise), "taxi")
    (tmp_path / "checks.py").write_text("def margin(rollout):\n    return 1.0\n")
    return ModelRollouts(repository.root, "taxi", gate_folder=tmp_path)


def begun(rollouts: ModelRollouts, *gates: UserGate, dry_run: tuple[str, ...] = ()) -> RolloutState:
    return rollouts.start(2, RolloutSettings(user_gates=gates, dry_run=dry_run), why="")


def test_start_notes_the_code_of_a_python_gate(rollouts: ModelRollouts, tmp_path: Path) -> None:
    gate = UserGate(name="margin", python="checks:margin", min=0.5)
    state = begun(rollouts, gate, dry_run=("margin",))

    assert len(state.settings.user_gates[0].code) == 64
    assert state.settings.user_gates == with_code([gate], tmp_path)
    shown = rollouts.status().gates[-1]
    assert (shown.gate, shown.verdict) == ("margin", "inconclusive")


@pytest.mark.parametrize(
    ("gates", "said"),
    [
        ([UserGate(name="slow_p99", python="checks:margin")], "name of a built-in gate"),
        ([UserGate(name="a", python="checks:margn")], "names a function of checks.py"),
        ([UserGate(name="a", python="other:margin")], "python of gate a names a module"),
        ([UserGate(name="a", python="checks:margin")] * 2, "The names of gates must differ"),
    ],
)
def test_a_gate_that_cannot_be_called_is_refused_at_the_start(
    rollouts: ModelRollouts, gates: list[UserGate], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        begun(rollouts, *gates)
    with pytest.raises(ConfigError, match="'margn' is not a gate"):
        begun(rollouts, UserGate(name="margin", python="checks:margin"), dry_run=("margn",))
    with pytest.raises(UserError, match="has no rollout"):
        rollouts.status()
