"""The labels of an embedding's vectors: the terms of the transform's vocabulary."""

from __future__ import annotations

from stoker.data.features.preprocessing.transform import Transform
from stoker.data.user_dataset.features import AnyTransform


def vocabulary_terms(transform: AnyTransform, name: str) -> list[str]:
    """Return the terms of a vocabulary in the order of their ids.

    Args:
        transform: The transform that learned it.
        name: An output made with it, or its `vocab_filename`.

    Raises:
        ConfigError: There is no such vocabulary; the error suggests the nearest one.
    """
    # Raises an error that says what is wrong with the name.
    transform.output.vocabulary_size(name)
    if not isinstance(transform, Transform):
        raise RuntimeError("only a transform of Stoker has vocabularies")
    spec = transform.spec
    ids = spec.ids.get(name)
    vocabulary = spec.vocabularies[ids.vocabulary if ids and ids.vocabulary else name]
    return [term.decode(errors="replace") for term in vocabulary.read(transform.root)]
