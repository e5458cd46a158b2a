"""The choice of how images are stored: what pays, what fits, and never silently lossy."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.core.errors import ConfigError
from stoker.data.ingest.image_store import (
    ChosenStore,
    ImageFacts,
    Space,
    choose_store,
    stored_image,
)
from stoker.data.sources.config import ImagesConfig, ImageStore

LARGE = ImageFacts(images=1_000_000, mean_bytes=700e3, mean_height=1200, mean_width=1600)
SMALL = ImageFacts(images=60_000, mean_bytes=900, mean_height=32, mean_width=32)
AMPLE = Space(memory_bytes=1 << 42, free_disk_bytes=1 << 42)


def choose(
    config: ImagesConfig, facts: ImageFacts = LARGE, *, epochs: int = 90, space: Space = AMPLE
) -> ChosenStore:
    return choose_store(config, facts, shorter=224, epochs=epochs, space=space)


def test_auto_stays_with_the_original_and_says_what_loss_would_gain() -> None:
    chosen = choose(ImagesConfig())

    assert chosen.store == "original"
    assert "allow_lossy: true, it would be raw, short side 256" in chosen.why
    assert "epochs" in chosen.why


def test_raw_is_chosen_where_it_fits_in_memory_and_loss_is_allowed() -> None:
    chosen = choose(ImagesConfig(allow_lossy=True))

    assert chosen.store == "raw"
    assert "lossy" in chosen.why


def test_what_does_not_fit_in_memory_is_resized() -> None:
    space = replace(AMPLE, memory_bytes=64 << 30)

    assert choose(ImagesConfig(allow_lossy=True), space=space).store == "resized"


def test_what_does_not_fit_on_the_disk_stays_as_it_came() -> None:
    space = replace(AMPLE, free_disk_bytes=10 << 30)
    chosen = choose(ImagesConfig(allow_lossy=True), space=space)

    assert chosen.store == "original"
    assert "would not fit" in chosen.why


def test_for_one_epoch_nothing_pays() -> None:
    chosen = choose(ImagesConfig(allow_lossy=True), epochs=1)

    assert chosen.store == "original"
    assert "would not save enough CPU time in 1 epochs" in chosen.why


def test_small_images_are_not_encoded_again() -> None:
    space = replace(AMPLE, memory_bytes=1 << 20)

    assert choose(ImagesConfig(allow_lossy=True), SMALL, space=space).store == "original"


@pytest.mark.parametrize("store", ["original", "resized", "raw"])
def test_a_store_that_is_set_by_name_is_used_and_its_loss_is_reported(store: str) -> None:
    chosen = choose(ImagesConfig(store=store), epochs=1)  # type: ignore[arg-type]  # a string of a Literal

    assert chosen.store == store
    assert ("lossy" in chosen.why) == (store != "original")


def test_a_store_smaller_than_what_the_model_sees_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 224"):
        choose(ImagesConfig(store="resized", store_size=200))


@given(
    images=st.integers(1, 10**7),
    mean_bytes=st.floats(10, 1e7),
    height=st.integers(1, 5000),
    width=st.integers(1, 5000),
    epochs=st.integers(1, 300),
)
def test_loss_is_never_chosen_unless_it_is_allowed(
    images: int, mean_bytes: float, height: int, width: int, epochs: int
) -> None:
    facts = ImageFacts(images=images, mean_bytes=mean_bytes, mean_height=height, mean_width=width)

    assert choose(ImagesConfig(), facts, epochs=epochs).store == "original"


@pytest.mark.parametrize("store", ["resized", "raw"])
def test_a_gif_is_left_to_the_models_own_decoder(tmp_path: Path, store: ImageStore) -> None:
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (96, 80, 3), np.uint8)
    path = tmp_path / "one.gif"
    cv2.imwriteanimation(str(path), _one_frame(pixels))
    made = path.read_bytes()
    chosen = ChosenStore(store=store, short_side=32, quality=90, why="")

    assert stored_image(made, chosen, channels=3) == made


def _one_frame(pixels: np.ndarray[Any, Any]) -> cv2.Animation:
    animation = cv2.Animation()
    animation.frames, animation.durations = [pixels], [100]
    return animation


IN_A_CONTAINER = """
mkdir "$1/memory" && echo 3000000 > "$1/memory/memory.limit_in_bytes" && mount --bind "$1" /sys/fs/cgroup
"$2" -c "
from pathlib import Path
from stoker.data.ingest.image_store import free_space
print(free_space(Path('/tmp')).memory_bytes)
"
"""


def test_a_containers_limit_of_memory_bounds_the_store(tmp_path: Path) -> None:
    unshare = ["unshare", "--mount", "--map-root-user"]
    if subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("needs a mount namespace of its own")

    done = subprocess.run(
        [*unshare, "sh", "-c", IN_A_CONTAINER, "sh", str(tmp_path), sys.executable],
        capture_output=True,
        text=True,
    )

    assert done.stdout == "3000000\n", done.stderr
