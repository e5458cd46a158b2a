"""Puts the versions of an image into a shared repository: `python -m stoker.rollout.seed FROM TO`.

It runs before each server of a Kubernetes deployment with a shared repository, on several nodes at once. A model that
has no rollout state yet gets one, so that a later version takes no traffic before `stoker rollout start`.
"""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path

from stoker.core.errors import EXIT_DONE, UserError
from stoker.registry.repository import Pushed, Repository
from stoker.rollout.control.controller import Event, change
from stoker.rollout.operations import operator
from stoker.rollout.state.changes import first_version
from stoker.rollout.state.files import Conflict, StateFiles
from stoker.rollout.state.state import FOLDER, RolloutSettings


def seed(source: Path, target: Path) -> list[Pushed]:
    """Copy each version of a repository into another one, under its own number.

    Raises:
        UserError: a version is damaged, or the other repository has another model under its number.
    """
    images, shared = Repository(source), Repository(target)
    done = []
    for model in images.models():
        serving = shared.newest(model)
        if serving is not None:
            _begin(shared, model, serving)
        done += [
            shared.add(images.path(model, version), model, version=version)
            for version in images.versions(model)
        ]
        if serving is None:
            _begin(shared, model, images.versions(model)[-1])
    return done


def _begin(shared: Repository, model: str, serving: int) -> None:
    """Let a state decide for a model from now on, with the version that serves; an existing state stays."""
    files = StateFiles(shared.base(model) / FOLDER)
    if files.latest() is not None:
        return
    now_s = time.time()
    state = first_version(serving, settings=RolloutSettings(), now_s=now_s, who=operator())
    event = Event(what="seed", who=operator(), why="first version of an image", at_s=now_s)
    with contextlib.suppress(Conflict):  # another server of the deployment was first
        change(files, None, state, event)


def main(arguments: list[str]) -> int:
    """Run the command; return its exit code."""
    source, target = map(Path, arguments)
    try:
        for pushed in seed(source, target):
            print(f"{pushed.path} {'was there already' if pushed.already else 'is new'}")
    except UserError as error:
        print(f"stoker: {error.line()}", file=sys.stderr)
        return error.exit_code
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
