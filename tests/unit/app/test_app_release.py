"""`push: {rollout: canary}`: the first version serves, and each later one has to earn its traffic."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.rollout.test_rollout_operations import SIMPLE, saved_model

from stoker.app.experiment import Experiment, load_experiment
from stoker.app.identity import run_identity
from stoker.app.release import alias_of_push, start_rollout
from stoker.core.errors import ConfigError, UserError
from stoker.registry.repository import Repository
from stoker.rollout.operations import ModelRollouts
from stoker.rollout.routing.router import RolloutRouter
from stoker.rollout.state.changes import promote_fully
from stoker.rollout.state.state import Phase
from stoker.serve.routing import Served, no_headers

CANARY = "push: {rollout: canary, settings: {stages: '5,100', min_requests: 10}}"


def experiment(folder: Path, *lines: str) -> Experiment:
    (folder / "model.py").write_text("def build():\n    pass\n")
    (folder / "rows.csv").write_text("a,b\n1,2\n")
    text = ["name: taxi", "data: {source: rows.csv}", "model: model:build", "label: b", *lines]
    (folder / "stoker.yaml").write_text("\n".join(text))
    return load_experiment(folder)


def push(wanted: Experiment, noise: str, **model: object) -> str:
    """What the stage `push` and the end of a run do."""
    root = wanted.models_root
    path = root.parent / f"exported-{noise}-{len(list(root.parent.glob('exported*')))}"
    saved_model(path, noise=noise, **model)  # type: ignore[arg-type]  # mypy cannot check **
    alias = alias_of_push(wanted)
    pushed = Repository(root).push(path, wanted.model_name, alias=alias)
    return start_rollout(wanted, pushed.version)


def serving(wanted: Experiment) -> int | None:
    """The version to which a server would send a request."""
    base = wanted.models_root / wanted.model_name
    router = RolloutRouter(server="one")
    router.refresh({"taxi": Served(base=base, failed={})})
    route = router.route("taxi", no_headers)
    return None if route is None else route.version


def test_the_first_version_serves_and_the_next_one_is_rolled_out(tmp_path: Path) -> None:
    wanted = experiment(tmp_path, CANARY)
    assert push(wanted, "a") == "version 1 is the first of taxi: it serves without a rollout"
    assert serving(wanted) is None  # without a state: the newest

    said = push(wanted, "b")
    assert said == "rollout of version 2 began: 5,100 % of the traffic, version 1 has the rest"
    state = ModelRollouts(wanted.models_root, "taxi").status().state
    assert (state.baseline, state.candidate, state.phase) == (1, 2, Phase.MEASURING)
    assert state.settings.min_requests == 10
    assert serving(wanted) == 1
    assert Repository(wanted.models_root).aliases("taxi") == {"champion": 1, "candidate": 2}
    assert push(wanted, "b") == "version 2 is under rollout already"


def test_no_server_sends_traffic_to_a_version_between_its_push_and_its_rollout(
    tmp_path: Path,
) -> None:
    wanted = experiment(tmp_path, CANARY)
    push(wanted, "a")

    assert alias_of_push(wanted) == "candidate"
    assert serving(wanted) == 1  # the state decides before there is another version


def test_a_version_that_was_rolled_back_stays_out_and_one_that_won_is_the_next_baseline(
    tmp_path: Path,
) -> None:
    wanted = experiment(tmp_path, CANARY)
    push(wanted, "a")
    push(wanted, "b")
    rollouts = ModelRollouts(wanted.models_root, "taxi")
    rollouts.roll_back(to=None, why="worse")
    assert "version 2 was rolled back and takes no traffic" in push(wanted, "b")
    assert rollouts.status().state.phase is Phase.ROLLED_BACK

    assert push(wanted, "a").startswith("rollout of version 3 began")
    with pytest.raises(
        UserError, match="Only one rollout or A/B test of a model can run at a time"
    ):
        push(wanted, "b")
    rollouts.apply(lambda state: promote_fully(state, now_s=1.0), what="promote", why="")
    assert push(wanted, "b") == (
        "rollout of version 4 began: 5,100 % of the traffic, version 3 has the rest"
    )
    assert Repository(wanted.models_root).aliases("taxi")["champion"] == 3


def test_a_version_that_clients_could_not_call_takes_no_traffic(tmp_path: Path) -> None:
    wanted = experiment(tmp_path, CANARY)
    push(wanted, "a")
    with pytest.raises(UserError, match="x"):
        push(wanted, "b", inputs={"z": SIMPLE["x"]})

    assert serving(wanted) == 1


def test_without_the_section_a_push_takes_all_traffic_and_the_section_makes_no_new_run(
    tmp_path: Path,
) -> None:
    plain = experiment(tmp_path)
    assert push(plain, "a") == push(plain, "b") == ""
    assert Repository(plain.models_root).aliases("taxi") == {"champion": 2}
    assert serving(plain) is None

    before = run_identity(plain, source="s")
    assert run_identity(experiment(tmp_path, CANARY), source="s") == before


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ("push: {rollout: blue}", "push.rollout must be one of: none, canary"),
        ("push: {rollout: canary, stages: '1'}", "push.stages is not a setting"),
        ("push:\n  settings:\n    min_requests: -1", "line 7: push.settings.min_requests must be"),
        ("push: {settings: {stages: '50,10'}}", "line 5: push.settings: The stages .* must rise"),
        ("push: {settings: {user_gates: [{name: a}]}}", "gate a must have prometheus and query"),
    ],
)
def test_a_section_of_another_form_is_refused(tmp_path: Path, section: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        experiment(tmp_path, section)
