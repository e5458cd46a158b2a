"""Where targets are named, and the errors on wrong ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stoker.core.errors import ConfigError
from stoker.jobs.targets import Target, find_target, read_targets, targets_file


def read(of_user: str = "", **of_experiment: Any) -> dict[str, Target]:
    if of_user:
        targets_file().parent.mkdir(parents=True)
        targets_file().write_text(of_user)
    return read_targets(of_experiment, file=Path("stoker.yaml"))


def line(of_user: str) -> str:
    with pytest.raises(ConfigError) as caught:
        find_target("a", read(of_user))
    return caught.value.line()


def test_this_machine_is_always_a_target() -> None:
    found = read()

    assert list(found) == ["local"]
    assert found["local"].settings.max_restarts == 3


def test_the_experiment_wins_over_the_user_and_both_over_the_default() -> None:
    found = read(
        "local: {provider: local, max_restarts: 5}\ndesk: {provider: local, max_restarts: 6}\n",
        desk={"provider": "local", "max_restarts": 7},
    )

    assert {name: each.settings.max_restarts for name, each in found.items()} == {
        "local": 5,
        "desk": 7,
    }


def test_an_unknown_target_names_the_nearest() -> None:
    targets = read("cluster: {provider: local}\n")

    with pytest.raises(
        ConfigError,
        match=r"--on must be the name of a target\. Received: 'clutser'\. Did you mean 'cluster'",
    ):
        find_target("clutser", targets)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: 1\nb: {provider: local}\n", "line 1: a must be a section"),
        ("a: {max_restarts: 1}\n", "a.provider must be given"),
        ("a: {provider: locl}\n", "line 1: a.provider names a kind of target. Received: 'locl'. Did you mean 'local'?"),
        ("a:\n  provider: local\n  max_restart: 1\n", "line 3: a.max_restart is not a setting. Did you mean 'max_restarts'?"),
        ("a: {provider: local, max_restarts: x}\n", "a.max_restarts must be"),
        ("a: {provider: local, grace_s: 0}\n", "a: grace_s must be from 1 to 3600 seconds"),
        ("a: {provider: [local]}\n", "a.provider names a kind of target"),
        ("- a\n", "must hold `key: value` lines"),
        ("a: {\n", "must be YAML"),
    ],
)  # fmt: skip
def test_a_wrong_target_is_one_line_with_file_and_key(text: str, said: str) -> None:
    found = line(text)

    assert said in found
    assert "targets.yaml" in found


def test_a_wrong_target_leaves_the_others_usable() -> None:
    targets = read("a: 1\nb: {provider: local}\n")

    assert find_target("b", targets).open() is not None
    with pytest.raises(ConfigError, match="line 1: a must be a section"):
        targets["a"].open()
