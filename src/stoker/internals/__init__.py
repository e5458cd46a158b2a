"""The only modules that use private names of TensorFlow and Keras, one for each library."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


def missing_names(used: Mapping[str, Iterable[str]], objects: Mapping[str, object]) -> list[str]:
    """Return, as `Class.name`, the used names that the library's objects no longer have.

    Args:
        used: Class or module -> the attributes that Stoker uses.
        objects: Class or module of `used` -> one object of it.
    """
    return [
        f"{owner}.{name}"
        for owner, names in used.items()
        for name in names
        if not hasattr(objects[owner], name)
    ]
