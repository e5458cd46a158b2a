"""Reads targets from the user's `targets.yaml` and from an experiment's `targets`; creates their providers."""

from __future__ import annotations

import importlib
import os
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.core.config import build, located, read_yaml
from stoker.core.errors import ConfigError, Plain, nearest
from stoker.jobs import providers
from stoker.jobs.provider import Provider, ProviderKind

LOCAL = "local"
"""The target that always exists: this machine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A machine or a cluster to which jobs are submitted."""

    name: str
    provider: str
    settings: Any
    """The settings of the target, an instance of `ProviderKind.settings`."""

    problem: ConfigError | None = None
    """What is wrong with the section of the target; then the target has no settings."""

    def open(self) -> Provider:
        """Create the provider of the target; no request is sent.

        Raises:
            ConfigError: the target's section is wrong.
        """
        if self.problem is not None:
            raise self.problem
        return _kind(self.provider, where=f"targets.{self.name}").make(self.name, self.settings)


def targets_file() -> Path:
    """Return the path of the user's file of targets, which need not exist."""
    home = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(home) / "stoker" / "targets.yaml"


def read_targets(of_experiment: Mapping[str, Any], *, file: Path) -> dict[str, Target]:
    """Return all targets by name.

    Args:
        of_experiment: The section `targets` of a stoker.yaml; it takes precedence over the user's file.
        file: Path of this stoker.yaml, for messages.

    Raises:
        ConfigError: the user's file is not YAML. (An invalid section of a target raises no error; see
            `Target.problem`.)
    """
    found = {LOCAL: _built(LOCAL, {"provider": LOCAL})}
    own = targets_file()
    if own.is_file():
        found |= _of_file(read_yaml(own), own, prefix="")
    return found | _of_file(of_experiment, file, prefix="targets.")


def _of_file(section: Mapping[str, Any], file: Path, *, prefix: str) -> dict[str, Target]:
    found = {}
    for name, raw in section.items():
        try:
            found[name] = _built(f"{prefix}{name}", raw)
        except ConfigError as error:
            problem = located(error, file)
            found[name] = Target(name=name, provider="", settings=None, problem=problem)
    return found


def find_target(name: str, targets: Mapping[str, Target]) -> Target:
    """Return the target with this name.

    Raises:
        ConfigError: no target has this name (the message names the most similar one), or its section is invalid.
    """
    if name not in targets:
        fix = f"{nearest(name, targets)} Targets are named in {targets_file()} and stoker.yaml."
        raise ConfigError("--on must be the name of a target", got=name, fix=fix)
    if (problem := targets[name].problem) is not None:
        raise problem
    return targets[name]


def provider_names() -> list[str]:
    """Return the names of all kinds of targets: the packages in `jobs/providers`."""
    return sorted(each.name for each in pkgutil.iter_modules(providers.__path__) if each.ispkg)


def _built(where: str, raw: object) -> Target:
    """Return the target that a section describes; the section's dotted key ends with the target's name."""
    if not isinstance(raw, Mapping):
        raise ConfigError(
            f"{where} must be a section of `key: value` lines",
            got=raw,
            fix="E.g. `provider: local`.",
        )
    provider = raw.get("provider")
    if provider is None:
        raise ConfigError(
            f"{where}.provider must be given",
            got=Plain("nothing"),
            fix=f"Known: {', '.join(provider_names())}.",
        )
    kind = _kind(provider, where=where)
    values = {key: value for key, value in raw.items() if key != "provider"}
    try:
        settings = build(kind.settings, values, where=where)
    except ConfigError as error:
        rule = error.rule if error.rule.startswith(where) else f"{where}: {error.rule}"
        raise ConfigError(rule, got=error.got, fix=error.fix) from None
    name = where.removeprefix("targets.")
    return Target(name=name, provider=str(provider), settings=settings)


def _kind(provider: object, *, where: str) -> ProviderKind:
    known = provider_names()
    if provider not in known:
        raise ConfigError(
            f"{where}.provider names a kind of target",
            got=provider,
            fix=nearest(str(provider), known),
        )
    kind: ProviderKind = importlib.import_module(f"{providers.__name__}.{provider}.kind").KIND
    return kind
