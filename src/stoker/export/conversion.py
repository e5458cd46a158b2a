"""A SavedModel in another form, held against the SavedModel on real rows before anyone sees it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.core.config import nearest
from stoker.core.errors import CheckFailed, ConfigError, Plain
from stoker.core.files import list_files, publish_folder, scratch_folder, write_json
from stoker.export.carried import Converted, NotCarriedError
from stoker.export.litert import FORMATS as LITERT
from stoker.export.onnx import FORMATS as ONNX
from stoker.export.signatures import SERVING_DEFAULT, SERVING_TRANSFORMED, TRANSFORM_FEATURES
from stoker.export.tfjs import FORMATS as TFJS
from stoker.export.tfjs import form as tfjs_form
from stoker.registry.callpath import LoadedModel, TensorSpec, load_model

Rows = Mapping[str, NDArray[Any]]
"""Input -> [rows, ...] values."""

FORMATS: Mapping[str, Converted] = {**LITERT, **ONNX, **TFJS}
"""Name -> how a model is written in it, and asked."""

REPORT = "conversion.json"
"""What was converted, from what, and how far it is off; beside the model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversion:
    """What was written, and how it compares."""

    to: str
    """The form."""

    signature: str
    """The signature that it answers."""

    why: str
    """Why it is not the usual one; "" where it is."""

    inputs: dict[str, str]
    """What it takes: name -> dtype and shape."""

    rows: int
    """Rows that it was compared on."""

    tolerance: float
    """Most that an answer may be off, absolute plus relative."""

    differences: dict[str, float]
    """Output -> the most by which it is off, as a share of what the tolerance is a share of."""

    same_choice: dict[str, float]
    """Output of several values -> the share of rows in which the same one is the largest."""

    size_bytes: int
    """Of its files."""

    saved_model_bytes: int
    """Of the SavedModel's."""


def convert(
    saved_model: Path,
    to: str,
    out: Path,
    *,
    rows: Rows,
    representative: Rows,
    signature: str = "",
    tolerance: float | None = None,
    tfjs_python: Path | None = None,
) -> Conversion:
    """Convert, compare, and publish the folder `out`; or leave nothing.

    Args:
        saved_model: Its folder.
        to: One of `FORMATS`.
        out: Where to; must not exist.
        rows: Raw rows that both are asked about.
        representative: Raw rows by which ranges are measured, where the form needs them.
        signature: Which one; if "", the usual one, else the model behind its transform.
        tolerance: Most that an answer may be off; the form's own if None.
        tfjs_python: The interpreter that has TensorFlow.js's converter; ours if None.

    Raises:
        ConfigError: the folder exists, or there is no such form or signature.
        UserError: the SavedModel is damaged, or does not take the rows; or a package is missing.
        NotCarriedError: the form has no word for some of the model's operations, which are named.
        CheckFailed: it answers otherwise.
    """
    form = _form(to, tfjs_python)
    allowed = form.tolerance if tolerance is None else tolerance
    if os.path.lexists(out):
        raise ConfigError("--out must be a folder that does not exist yet", got=str(out))
    model = load_model(saved_model)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with scratch_folder(out) as scratch:
            taken, why = _write(form, model, scratch, representative, signature)
            asked = _as_taken(model, rows, taken)
            expected = model.call(taken, asked)
            found = form.ask(scratch, taken, asked)
            compared = _compare(to, expected, found, allowed)
            made = Conversion(
                to=to,
                signature=taken,
                why=why,
                inputs={n: str(s) for n, s in model.signatures[taken].inputs.items()},
                rows=_count(rows),
                tolerance=allowed,
                differences=compared,
                same_choice=_same_choice(expected, found),
                size_bytes=_size(scratch),
                saved_model_bytes=_size(saved_model),
            )
            write_json(scratch / REPORT, asdict(made) | {"saved_model": str(saved_model)})
            publish_folder(scratch, out)
            return made
    finally:
        model.close()


def _form(to: str, tfjs_python: Path | None) -> Converted:
    if to not in FORMATS:
        raise ConfigError(
            f"a model is converted to one of {', '.join(FORMATS)}", got=to, fix=nearest(to, FORMATS)
        )
    form = tfjs_form(tfjs_python) if to in TFJS else FORMATS[to]
    form.require()
    return form


def _write(
    form: Converted, model: LoadedModel, folder: Path, representative: Rows, signature: str
) -> tuple[str, str]:
    """Write the first signature that the form can carry; returns it, and why it is not the usual."""
    if signature and signature not in model.signatures:
        raise ConfigError(
            "the signature must be one of the model's",
            got=signature,
            fix=nearest(signature, model.signatures),
        )
    wanted = [signature or SERVING_DEFAULT]
    if not signature and SERVING_TRANSFORMED in model.signatures:
        wanted.append(SERVING_TRANSFORMED)
    refusals = []
    for name in wanted:
        try:
            _require_words(form, model, name)
            form.write(model, name, folder, _as_taken(model, representative, name))
        except NotCarriedError as error:
            refusals.append(error)
        else:
            return name, "".join(refusal.line() for refusal in refusals)
    raise refusals[-1]


def _require_words(form: Converted, model: LoadedModel, signature: str) -> None:
    """Refuse text before the converter is asked: a device has no use for one, and some say yes."""
    taken = {**model.signatures[signature].inputs, **model.signatures[signature].outputs}
    texts = [name for name, spec in taken.items() if spec.dtype == "string"]
    if texts:
        raise NotCarriedError(form.name, [f"text, which {name} is" for name in texts])


def _as_taken(model: LoadedModel, rows: Rows, signature: str) -> Rows:
    """Raw rows as a signature takes them: for the model behind its transform what that makes."""
    if signature == SERVING_TRANSFORMED:
        return model.call(TRANSFORM_FEATURES, rows)
    specs = model.signatures[signature].inputs
    return {n: _whole(array, specs[n]) if n in specs else array for n, array in rows.items()}


def _whole(array: NDArray[Any], spec: TensorSpec) -> NDArray[Any]:
    """With the trailing axes of length one that a server lets be left out, and no other form does."""
    if spec.shape is None or not spec.takes(array.shape):
        return array  # the SavedModel refuses what it does not take, by the input's name
    return array.reshape(array.shape + (1,) * (len(spec.shape) - array.ndim))


def _count(rows: Rows) -> int:
    """How many rows they are; a single value, of a model without rows, is one."""
    first = next(iter(rows.values()))
    return len(first) if first.ndim else 1


def _compare(to: str, expected: Rows, found: Rows, allowed: float) -> dict[str, float]:
    """Output -> how far off it is, at most.

    Raises:
        CheckFailed: one is further off than is allowed.
    """
    if set(expected) != set(found):
        raise CheckFailed(
            f"the {to} model must have the outputs {', '.join(sorted(expected))}",
            got=Plain(", ".join(sorted(found))),
        )
    differences = {name: _off(expected[name], found[name]) for name in sorted(expected)}
    worst = max(differences, key=differences.__getitem__)
    if not differences[worst] <= allowed:
        raise CheckFailed(
            f"the {to} model must answer as the SavedModel does, within {allowed:g} absolute plus "
            "relative",
            got=Plain(f"{differences[worst]:.3g} for output {worst!r}"),
            fix="Give more representative rows, another form, or a --tolerance you can live with.",
        )
    return differences


def _off(expected: NDArray[Any], found: NDArray[Any]) -> float:
    """The largest |difference| / (1 + |expected|): what the tolerance is compared with."""
    if expected.shape != found.shape:
        return float("inf")
    if expected.dtype.kind not in "fiu":
        return 0.0 if (expected == found).all() else float("inf")
    wide, other = expected.astype(np.float64), found.astype(np.float64)
    same = (wide == other) | (np.isnan(wide) & np.isnan(other))
    with np.errstate(invalid="ignore"):
        off = np.where(same, 0.0, np.abs(wide - other) / (1.0 + np.abs(wide)))
    # NaN on one side only is as far off as can be.
    return float(np.nan_to_num(off, nan=np.inf, posinf=np.inf).max(initial=0.0))


def _same_choice(expected: Rows, found: Rows) -> dict[str, float]:
    several = [name for name, v in expected.items() if v.ndim == 2 and v.shape[1] > 1]
    return {
        name: float(np.mean(expected[name].argmax(axis=1) == found[name].argmax(axis=1)))
        for name in several
    }


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in list_files(folder))
