"""The only modules that use private names of TensorFlow and Keras, one module for each library."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


def missing_names(used: Mapping[str, Iterable[str]], objects: Mapping[str, object]) -> list[str]:
    """Return the attributes that Stoker uses but a library no longer has, as `Class.name`.

    Args:
        used: Name of a class or module -> its attributes that Stoker uses.
        objects: Name of a class or module in `used` -> an object of the class, or the module.
    """
    return [
        f"{owner}.{name}"
        for owner, names in used.items()
        for name in names
        if not hasattr(objects[owner], name)
    ]
