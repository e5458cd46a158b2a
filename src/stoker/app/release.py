"""For `push: {rollout: canary}`: prepares the push, and starts the rollout of the pushed version."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker.registry.repository import Repository

if TYPE_CHECKING:
    from stoker.app.experiment import Experiment
    from stoker.rollout.operations import ModelRollouts

LATEST = "champion"
"""Alias of a version that was pushed without a rollout, and takes all traffic."""

CANDIDATE = "candidate"
"""Alias of a pushed version whose rollout is not complete."""

_WHY = "stoker run"


def alias_of_push(experiment: Experiment) -> str:
    """Prepare a push, and return the alias of the pushed version.

    For a canary, the version that serves now is first written to a rollout state: without a state, servers would send
    all traffic to the newest version as soon as it exists.
    """
    rollouts = _rollouts(experiment)
    if rollouts is None:
        return LATEST
    serving = rollouts.hold(why=_WHY)
    Repository(experiment.models_root).set_alias(experiment.model_name, LATEST, version=serving)
    return CANDIDATE


def start_rollout(experiment: Experiment, version: int) -> str:
    """Start the rollout of a pushed version, if the experiment sets one.

    Returns:
        One line about what was done; empty without a rollout.

    Raises:
        UserError: the rollout of another version is running, or clients of the serving version
            could not call this version, which stays in the repository and takes no traffic.
    """
    rollouts = _rollouts(experiment)
    if rollouts is None:
        return ""
    state = rollouts.state()
    if state is None:
        return f"version {version} is the first of {experiment.model_name}: it serves without a rollout"
    if version == state.stable:
        return f"version {version} takes the traffic already"
    if version in state.rejected:
        return (
            f"version {version} was rolled back and takes no traffic; "
            f"`stoker rollout start {experiment.model_name} {version}` tries it again"
        )
    if state.is_active and version == state.candidate:
        return f"version {version} is under rollout already"
    begun = rollouts.start(version, experiment.push.settings, why=_WHY)
    return (
        f"rollout of version {version} began: {begun.settings.stages} % of the traffic, "
        f"version {begun.baseline} has the rest"
    )


def _rollouts(experiment: Experiment) -> ModelRollouts | None:
    """Return the rollouts of the experiment's model; None if it sets no rollout, or the model has no version yet."""
    from stoker.rollout.operations import ModelRollouts

    repository, model = Repository(experiment.models_root), experiment.model_name
    if experiment.push.rollout != "canary" or not repository.versions(model):
        return None
    return ModelRollouts(experiment.models_root, model, gate_folder=experiment.folder)
