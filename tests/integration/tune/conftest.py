"""Shared settings of the tests that profile and tune."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from stoker.scriptprofile.utilization import with_reached


@pytest.fixture(scope="module", autouse=True)
def brief_peak() -> Iterator[None]:
    """How fast the device can be does not matter here; measuring it keeps all cores busy for 4 s."""
    defaults = with_reached.__kwdefaults__
    assert defaults is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(defaults, "peak_s", 0.2)
        yield
