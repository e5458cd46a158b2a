"""Copies the versions of a container image into a shared repository: `python -m stoker.rollout.seed FROM TO`.

It runs before each server of a Kubernetes deployment with a shared repository, possibly on several nodes at once. It
creates a rollout state for a model without one, so that a later version takes no traffic before `stoker rollout start`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from stoker.core.errors import EXIT_DONE, UserError
from stoker.registry.repository import Pushed, Repository
from stoker.rollout.operations import ModelRollouts

_WHY = "first version of an image"


def seed(source: Path, target: Path) -> list[Pushed]:
    """Copy each version of a repository to another repository, under the same number.

    Raises:
        UserError: a version is damaged, or the other repository has a different version under its number.
    """
    images, shared = Repository(source), Repository(target)
    done = []
    for model in images.models():
        is_new = shared.newest(model) is None
        if not is_new:
            ModelRollouts(target, model).hold(why=_WHY)
        done += [
            shared.add(images.path(model, version), model, version=version)
            for version in images.versions(model)
        ]
        if is_new:
            ModelRollouts(target, model).hold(why=_WHY)
    return done


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
