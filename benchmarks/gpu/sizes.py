"""All sizes: on a GPU as the figures require, on the CPU as small as is meaningful."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """The sizes of one device."""

    photographs: int
    """JPEG files."""

    height: int
    width: int
    """Size of a file, pixels."""

    crop: int
    """Height and width of the network's input, pixels."""

    batch: int
    """Images per step."""

    network: str
    """`resnet50`, or `small` for a network of one block."""

    precision: str
    """Precision of `model.fit`; ours uses its own `auto`."""

    fit_s: float
    """`model.fit` is ended this long after its process started, seconds."""

    after_s: float
    """`model.fit` is ended this long after its first step, seconds."""

    train_s: float
    """Ours ends with the first epoch that ends after this time, seconds."""

    start_s: float
    """Length of the cold start, seconds, so that compiled programs are kept for the warm one."""

    layers: int
    units: int
    heads: int
    words: int
    length: int
    texts: int
    """Transformer: encoder layers, width, heads, vocabulary, tokens per text, texts per step."""

    text_steps: int
    """Steps per epoch of the Transformer."""

    peak_s: float
    """Time to measure the device's peak, seconds."""

    rounds: int
    """Turns of each side for the small models."""

    served_batch: int
    """Images per request."""

    served_s: float
    """Time of requests to the server, seconds."""

    budget: str
    """Budget of `stoker tune`."""


GPU = Sizes(
    photographs=9_600,
    height=375,
    width=500,
    crop=224,
    batch=256,
    network="resnet50",
    precision="mixed_bfloat16",
    fit_s=60.0,
    after_s=12.0,
    train_s=34.0,
    start_s=30.0,
    layers=12,
    units=768,
    heads=12,
    words=30_522,
    length=128,
    texts=128,
    text_steps=100,
    peak_s=4.0,
    rounds=6,
    served_batch=32,
    served_s=5.0,
    budget="85s",
)

CPU = Sizes(
    photographs=96,
    height=48,
    width=64,
    crop=32,
    batch=8,
    network="small",
    precision="float32",
    fit_s=0.5,
    after_s=0.1,
    train_s=0.1,
    start_s=0.0,
    layers=1,
    units=32,
    heads=2,
    words=200,
    length=16,
    texts=8,
    text_steps=12,
    peak_s=0.1,
    rounds=2,
    served_batch=4,
    served_s=0.1,
    budget="60s",
)
