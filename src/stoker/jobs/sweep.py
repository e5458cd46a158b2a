"""Sweeps: one job for each combination of values of some settings, submitted together.

    RUNS/.jobs/NAME-sweep-HASH/
      sweep.json        this description
      code.tar.gz       the code of all jobs; the folders of the jobs have links to it
      0, 1, ...         links to the folders of the jobs

Each element is a normal job. Its ID, folder, run, logs and starts are the same as if it were submitted alone.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from stoker.core.config import build
from stoker.core.errors import ConfigError, Plain
from stoker.core.files import read_json, write_atomic
from stoker.core.fingerprint import fingerprint
from stoker.jobs.job import ID_DIGITS, JOBS
from stoker.jobs.places import folders_with

FILE = "sweep.json"

INFIX = "-sweep-"
"""Part of a sweep's ID between the experiment's name and the hash."""

MAX_ELEMENTS = 1000
"""Maximum number of elements; Slurm's `MaxArraySize` is 1001 by default."""

_PAIRS = {"[": "]", "{": "}", "(": ")", '"': '"', "'": "'"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Element:
    """One combination of values."""

    job: str
    """ID of the element's job."""

    settings: tuple[str, ...]
    """Settings of this combination, each `dotted.key=value`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
    """The jobs of one sweep."""

    name: str
    """Name of the experiment."""

    runs: Path
    """Folder of runs."""

    elements: tuple[Element, ...]

    @property
    def id(self) -> str:
        """`NAME-sweep-` and eight hexadecimal digits of a hash of the jobs' IDs."""
        return f"{self.name}{INFIX}{fingerprint([each.job for each in self.elements])[:ID_DIGITS]}"

    @property
    def place(self) -> Path:
        """Folder of the sweep."""
        return self.runs / JOBS / self.id


def combinations(sweeps: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the settings of each combination; the last key varies fastest.

    Args:
        sweeps: Texts of the form `KEY=VALUE,VALUE`; a comma inside brackets or quotes is part of a value.

    Raises:
        ConfigError: a text has another form, a key or value occurs twice, or there are too many combinations.
    """
    found: dict[str, list[str]] = {}
    for text in sweeps:
        key, equals, rest = text.partition("=")
        values = [value.strip() for value in _values(rest)]
        if not key or not equals or not all(values):
            raise _wrong("--sweep must be KEY=VALUE,VALUE", text)
        if key in found or len(set(values)) < len(values):
            raise _wrong("--sweep must name each key and each of its values once", text)
        found[key] = values
    pairs = [[f"{key}={value}" for value in values] for key, values in found.items()]
    count = 1
    for each in pairs:
        count *= len(each)
    if count > MAX_ELEMENTS:
        raise ConfigError(
            f"a sweep must have at most {MAX_ELEMENTS} combinations",
            got=count,
            fix="Leave out some values, or submit it in parts.",
        )
    return list(itertools.product(*pairs))


def write_sweep(sweep: Sweep) -> None:
    """Write the description and the links to the jobs' folders, if they are missing."""
    values = asdict(sweep) | {"runs": str(sweep.runs)}
    write_atomic(sweep.place / FILE, json.dumps(values, indent=1) + "\n")
    for number, element in enumerate(sweep.elements):
        link = sweep.place / str(number)
        if not link.is_symlink():
            link.symlink_to(Path("..") / element.job)


def read_sweep(place: Path) -> Sweep:
    """Read the sweep of a folder.

    Raises:
        ConfigError: the folder is not the folder of a sweep.
    """
    return build(Sweep, read_json(place / FILE), where=str(place / FILE))


def sweeps(runs: Iterable[Path] = ()) -> dict[str, Sweep]:
    """Return ID -> sweep, for the sweeps in the user's index and in folders of runs."""
    found = {}
    for place in folders_with(FILE, runs):
        try:
            found[place.name] = read_sweep(place)
        except (ConfigError, OSError):
            # The sweep is another user's or damaged: its jobs are listed without it.
            continue
    return found


def find_sweep(named: str, runs: Iterable[Path] = ()) -> Sweep | None:
    """Return the sweep with this ID, or the only one whose ID begins with this text (at least `NAME-sweep`).

    Raises:
        ConfigError: more than one sweep fits.
    """
    known = sweeps(runs) if INFIX.rstrip("-") in named else {}
    matches = [each for job, each in known.items() if job.startswith(named)]
    if len(matches) > 1 and named not in known:
        raise ConfigError(
            "the beginning of a sweep's ID must fit one sweep",
            got=Plain(f"{named!r}, which fits {', '.join(each.id for each in matches)}"),
            fix="Give more characters of the ID.",
        )
    return known.get(named) or (matches[0] if matches else None)


def element_of(sweep: Sweep, number: str) -> Element:
    """Return an element by its number.

    Raises:
        ConfigError: the sweep does not have the element.
    """
    last = len(sweep.elements) - 1
    if not (number.isascii() and number.isdecimal() and len(number) <= 6 and int(number) <= last):
        raise ConfigError(f"the elements of sweep {sweep.id} are 0 to {last}", got=number)
    return sweep.elements[int(number)]


def _values(text: str) -> list[str]:
    """Split a text at the commas that are not in brackets or quotes."""
    found, closing = [""], ""
    for letter in text:
        if letter == "," and not closing:
            found.append("")
            continue
        found[-1] += letter
        if closing and letter == closing[-1]:
            closing = closing[:-1]
        elif letter in _PAIRS and closing[-1:] not in ("'", '"'):
            closing += _PAIRS[letter]
    return found


def _wrong(rule: str, text: str) -> ConfigError:
    return ConfigError(rule, got=text, fix="E.g. --sweep train.epochs=3,5.")
