"""The words that an embedding's vectors stand for: the terms of the transform's vocabulary."""

from __future__ import annotations

from stoker.data.features.transform import Transform
from stoker.data.own.features import AnyTransform


def vocabulary_terms(transform: AnyTransform, name: str) -> list[str]:
    """The terms of a vocabulary, in the order of their ids.

    Args:
        transform: What learned it.
        name: An output that came from it, or its `vocab_filename`.

    Raises:
        ConfigError: there is no such vocabulary; the nearest is named.
    """
    # Also says what is wrong with the name.
    size = transform.output.vocabulary_size(name)
    if not isinstance(transform, Transform):
        raise RuntimeError("only a transform of ours has vocabularies")
    spec = transform.spec
    ids = spec.ids.get(name)
    file = spec.vocabularies[ids.vocabulary if ids and ids.vocabulary else name].file
    lines = (transform.root / file).read_bytes().split(b"\n")
    return [line.decode(errors="replace") for line in lines[:size]]
