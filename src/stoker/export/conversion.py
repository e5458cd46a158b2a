"""Converts a SavedModel to another format and compares the two on real rows before publishing."""

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
from stoker.export.litert import FORMATS as LITERT
from stoker.export.model_format import Arrays, ModelFormat, UnsupportedOperationsError
from stoker.export.onnx import FORMATS as ONNX
from stoker.export.signatures import SERVING_DEFAULT, SERVING_TRANSFORMED, TRANSFORM_FEATURES
from stoker.export.tfjs import FORMATS as TFJS
from stoker.export.tfjs import tfjs_format
from stoker.registry.exported_model import LoadedModel, TensorSpec, load_model

FORMATS: Mapping[str, ModelFormat] = {**LITERT, **ONNX, **TFJS}
"""Every format by its name for `--to`."""

REPORT = "conversion.json"
"""File next to the converted model: the `Conversion`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConversionSource:
    """A SavedModel, and the raw rows for its conversion."""

    saved_model: Path
    """Folder of the SavedModel."""

    rows: Arrays
    """Raw rows on which the answers are compared."""

    representative: Arrays
    """Raw rows from which int8 quantization measures ranges."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversion:
    """A converted model, and how its answers compare with the SavedModel's."""

    to: str
    """Name of the format."""

    signature: str
    """The signature that was converted."""

    why: str
    """Why the default signature was not converted; "" if it was."""

    inputs: dict[str, str]
    """Input -> dtype and shape."""

    rows: int
    """Number of rows that were compared."""

    tolerance: float
    """Maximum of |difference| / (1 + |expected answer|)."""

    differences: dict[str, float]
    """Output -> its largest difference, as |difference| / (1 + |expected|)."""

    same_choice: dict[str, float]
    """Output with several values per row -> share of rows in which both models give the largest value at the same
    position."""

    size_bytes: int
    """Size of the converted model's files, bytes."""

    saved_model_bytes: int
    """Size of the SavedModel's files, bytes."""


def convert(
    source: ConversionSource,
    to: str,
    out: Path,
    *,
    signature: str = "",
    tolerance: float | None = None,
    tfjs_python: Path | None = None,
) -> Conversion:
    """Convert a model, compare the answers, and publish the folder `out`; on failure, write nothing.

    Args:
        source: The SavedModel, and the rows to compare.
        to: One of `FORMATS`.
        out: The folder to write; must not exist.
        signature: The signature to convert; if "", the default one, or `serving_transformed` (the model
            without its transform) if the format does not support the default one.
        tolerance: Maximum difference of an answer; None for the format's default.
        tfjs_python: Interpreter that has the TensorFlow.js converter; None for the current one.

    Raises:
        ConfigError: the folder exists, the format or signature is unknown, or a package is missing.
        UserError: the SavedModel is damaged or does not accept the rows, or the converter failed.
        UnsupportedOperationsError: the format does not support some operations; the error names each of them.
        CheckFailed: the answers differ by more than the tolerance.
    """
    model_format = _required_format(to, tfjs_python)
    allowed = model_format.tolerance if tolerance is None else tolerance
    if os.path.lexists(out):
        raise ConfigError("--out must be a folder that does not exist yet", got=str(out))
    model = load_model(source.saved_model)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with scratch_folder(out) as scratch:
            name, why = _write(model_format, model, scratch, source.representative, signature)
            inputs = _signature_inputs(model, source.rows, name)
            expected = model.call(name, inputs)
            answers = model_format.run(scratch, name, inputs)
            conversion = Conversion(
                to=to,
                signature=name,
                why=why,
                inputs={n: str(spec) for n, spec in model.signatures[name].inputs.items()},
                rows=_row_count(source.rows),
                tolerance=allowed,
                differences=_compare(to, expected, answers, allowed),
                same_choice=_same_choice(expected, answers),
                size_bytes=_size(scratch),
                saved_model_bytes=_size(source.saved_model),
            )
            report = asdict(conversion) | {"saved_model": str(source.saved_model)}
            write_json(scratch / REPORT, report)
            publish_folder(scratch, out)
            return conversion
    finally:
        model.close()


def _required_format(to: str, tfjs_python: Path | None) -> ModelFormat:
    if to not in FORMATS:
        raise ConfigError(
            f"the format must be one of {', '.join(FORMATS)}", got=to, fix=nearest(to, FORMATS)
        )
    model_format = tfjs_format(tfjs_python) if to in TFJS else FORMATS[to]
    model_format.require()
    return model_format


def _write(
    model_format: ModelFormat,
    model: LoadedModel,
    folder: Path,
    representative: Arrays,
    signature: str,
) -> tuple[str, str]:
    """Write the first signature that the format supports.

    Returns:
        The signature, and why it is not the default one.
    """
    if signature and signature not in model.signatures:
        raise ConfigError(
            "the signature must be one of the model's signatures",
            got=signature,
            fix=nearest(signature, model.signatures),
        )
    candidates = [signature or SERVING_DEFAULT]
    if not signature and SERVING_TRANSFORMED in model.signatures:
        candidates.append(SERVING_TRANSFORMED)
    errors = []
    for name in candidates:
        try:
            _refuse_text(model_format, model, name)
            model_format.write(model, name, folder, _signature_inputs(model, representative, name))
        except UnsupportedOperationsError as error:
            errors.append(error)
        else:
            return name, "".join(error.line() for error in errors)
    raise errors[-1]


def _refuse_text(model_format: ModelFormat, model: LoadedModel, signature: str) -> None:
    """Raise an error for string tensors before the converter runs, because not every converter refuses them."""
    tensors = {**model.signatures[signature].inputs, **model.signatures[signature].outputs}
    texts = [name for name, spec in tensors.items() if spec.dtype == "string"]
    if texts:
        raise UnsupportedOperationsError(model_format.name, [f"text (in {name})" for name in texts])


def _signature_inputs(model: LoadedModel, rows: Arrays, signature: str) -> Arrays:
    """Convert raw rows to the inputs of a signature: `serving_transformed` takes transformed features."""
    if signature == SERVING_TRANSFORMED:
        return model.call(TRANSFORM_FEATURES, rows)
    specs = model.signatures[signature].inputs
    return {n: _full_rank(array, specs[n]) if n in specs else array for n, array in rows.items()}


def _full_rank(array: NDArray[Any], spec: TensorSpec) -> NDArray[Any]:
    """Add the trailing axes of length one that rows may leave out, as in requests to a server."""
    if spec.shape is None or not spec.takes(array.shape):
        return array  # the SavedModel refuses it, with an error that names the input
    return array.reshape(array.shape + (1,) * (len(spec.shape) - array.ndim))


def _row_count(rows: Arrays) -> int:
    """The number of rows; a scalar input (of a model without a batch axis) counts as one row."""
    first = next(iter(rows.values()))
    return len(first) if first.ndim else 1


def _compare(to: str, expected: Arrays, answers: Arrays, allowed: float) -> dict[str, float]:
    """Output -> its largest difference.

    Raises:
        CheckFailed: a difference exceeds the tolerance.
    """
    if set(expected) != set(answers):
        raise CheckFailed(
            f"the {to} model must have the outputs {', '.join(sorted(expected))}",
            got=Plain(", ".join(sorted(answers))),
        )
    differences = {name: _difference(expected[name], answers[name]) for name in sorted(expected)}
    worst = max(differences, key=differences.__getitem__)
    if not differences[worst] <= allowed:
        raise CheckFailed(
            f"the {to} model must give the same answers as the SavedModel: |difference| / (1 + |expected|) at most "
            f"{allowed:g}",
            got=Plain(f"{differences[worst]:.3g} for output {worst!r}"),
            fix="Give more representative rows, another format, or a larger --tolerance.",
        )
    return differences


def _difference(expected: NDArray[Any], answer: NDArray[Any]) -> float:
    """The largest |difference| / (1 + |expected|)."""
    if expected.shape != answer.shape:
        return float("inf")
    if expected.dtype.kind not in "fiu":
        return 0.0 if (expected == answer).all() else float("inf")
    wide, other = expected.astype(np.float64), answer.astype(np.float64)
    same = (wide == other) | (np.isnan(wide) & np.isnan(other))
    with np.errstate(invalid="ignore"):
        off = np.where(same, 0.0, np.abs(wide - other) / (1.0 + np.abs(wide)))
    # If only one of the two values is NaN, the difference counts as infinite.
    return float(np.nan_to_num(off, nan=np.inf, posinf=np.inf).max(initial=0.0))


def _same_choice(expected: Arrays, answers: Arrays) -> dict[str, float]:
    several = [name for name, v in expected.items() if v.ndim == 2 and v.shape[1] > 1]
    return {
        name: float(np.mean(expected[name].argmax(axis=1) == answers[name].argmax(axis=1)))
        for name in several
    }


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in list_files(folder))
