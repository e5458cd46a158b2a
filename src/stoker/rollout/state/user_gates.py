"""Gates of the user: a Prometheus query or a Python function, and limits of the returned value.

errors:                                   # gates.yaml: a section for each gate
  prometheus: http://prometheus:9090
  query: sum(rate(errors_total{version="${candidate}"}[1m]))
  max: 0.05
margin:
  python: checks:margin                   # checks.py next to gates.yaml
  min: 0.2
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from stoker.core.config import build, read_yaml
from stoker.core.errors import ConfigError, Plain
from stoker.core.source_fingerprint import source_fingerprint
from stoker.core.user_code import require_function, split_reference
from stoker.rollout.http_call import check_url

_NAME = re.compile(r"[a-z][a-z0-9_]{0,62}")


@dataclass(frozen=True, kw_only=True, slots=True)
class UserGate:
    """A gate of the user."""

    name: str = ""
    """Name of the gate, unique among all gates."""

    prometheus: str = ""
    """URL of the Prometheus server that answers `query`."""

    query: str = ""
    """PromQL; `${model}`, `${candidate}` and `${baseline}` are replaced by the model and the versions."""

    python: str = ""
    """`module:function` in the server's --gate-folder, called with a dict; it returns true, false or a number."""

    min: float | None = None
    """Smallest number that passes."""

    max: float | None = None
    """Largest number that passes."""

    every_s: float = 10.0
    """Interval between two calls, seconds."""

    timeout_s: float = 10.0
    """Maximum time for an answer, seconds."""

    code: str = ""
    """Fingerprint of the Python function's source at the start of the rollout."""

    def __post_init__(self) -> None:
        where = f"gate {self.name}"
        if not _NAME.fullmatch(self.name):
            raise ConfigError(
                "The name of a gate must be lower-case letters, digits and _",
                got=self.name,
                fix="E.g. error_rate.",
            )
        if bool(self.prometheus) == bool(self.python) or bool(self.prometheus) != bool(self.query):
            raise ConfigError(
                f"{where} must have prometheus and query, or python",
                got=Plain(
                    f"prometheus {self.prometheus!r}, query {self.query!r}, python {self.python!r}"
                ),
                fix="See docs/how-to/roll-out.md.",
            )
        if self.prometheus:
            check_url(self.prometheus, where=f"prometheus of {where}")
        else:
            split_reference(self.python, where=f"python of {where}")
        self._check_numbers(where)

    def _check_numbers(self, where: str) -> None:
        limits = [limit for limit in (self.min, self.max) if limit is not None]
        if self.prometheus and not limits:
            raise ConfigError(f"{where} must have min or max", fix="E.g. max: 0.05.")
        if not all(map(math.isfinite, limits)) or sorted(limits) != limits:
            raise ConfigError(f"{where} must have min <= max", got=limits)
        for name in ("every_s", "timeout_s"):
            if not 0.1 <= getattr(self, name) <= 3_600.0:
                raise ConfigError(
                    f"{name} of {where} must lie in 0.1..3600 seconds", got=getattr(self, name)
                )

    def question(self, **facts: str | int) -> str:
        """Return the query with the model and the versions filled in."""
        query = self.query
        for name, value in facts.items():
            query = query.replace(f"${{{name}}}", str(value))
        return query


def read_gates(path: Path) -> tuple[UserGate, ...]:
    """Read the gates of a YAML file.

    Raises:
        ConfigError: the file cannot be read, or a gate is invalid.
    """
    if not path.is_file():
        raise ConfigError("The file of gates must exist", got=str(path))
    gates = []
    for name, section in read_yaml(path).items():
        if isinstance(section, dict) and section.keys() & {"name", "code"}:
            raise ConfigError(
                f"gate {name} of {path} must not set name or code",
                fix="The key of the section is the name.",
            )
        named = {**section, "name": name} if isinstance(section, dict) else section
        gates.append(build(UserGate, named, where=str(name)))
    return tuple(gates)


def with_code(gates: Sequence[UserGate], folder: Path | None) -> tuple[UserGate, ...]:
    """Return the gates with the fingerprint of their Python source, to detect a server with different source.

    Args:
        gates: The user's gates.
        folder: Folder of the gates' modules; None: no Python gates.

    Raises:
        ConfigError: a function does not exist.
    """
    return tuple(replace(gate, code=_code(gate, folder)) if gate.python else gate for gate in gates)


def _code(gate: UserGate, folder: Path | None) -> str:
    if folder is None:
        raise ConfigError(
            f"gate {gate.name} needs the folder of its Python module",
            got=gate.python,
            fix="Start the server with --gate-folder, or use `stoker rollout start --gates FILE`.",
        )
    require_function(folder, gate.python, where=f"python of gate {gate.name}")
    return code_of(folder, gate.python)


def code_of(folder: Path, reference: str) -> str:
    """Return the fingerprint of a function's source and of the modules that it uses from its folder."""
    module, _, function = reference.partition(":")
    return source_fingerprint(folder, module, function)[0]
