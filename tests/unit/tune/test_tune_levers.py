"""Which levers there are in which situation, and in which order."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stoker.tune.levers import Lever, Situation, levers, other_precision

CPU = Situation(
    own_dataset=False,
    passes_agree=False,
    image_store="original",
    string_features=False,
    gpus=0,
    cores=8,
    intra_op_threads=None,
    replicas=1,
    reduction_dtype="float32",
    bfloat16=True,
    precision="float32",
    xla=False,
    steps_per_call=1,
    per_epoch=200,
    batch_size=32,
    batch_is_set=True,
    accumulate=1,
    cached=False,
)


def settings(situation: Situation) -> list[dict[str, object]]:
    return [dict(lever.settings) for lever in levers(situation)]


def lever(situation: Situation, name: str) -> Lever:
    (found,) = (lever for lever in levers(situation) if name in lever.settings)
    return found


def test_what_others_depend_on_comes_first() -> None:
    parts = [lever.part for lever in levers(CPU)]

    assert parts == sorted(parts, key=["input", "python", "step"].index)
    assert settings(CPU) == [
        {"data.images.store": "resized"},
        {"data.images.store": "raw"},
        {"train.steps_per_call": 10},
        {"train.steps_per_call": 50},
        {"train.precision": "mixed_bfloat16"},
        {"train.xla": True},
        {"train.intra_op_threads": 4},
        {"train.batch_size": 128},
    ]


def test_a_call_has_no_more_steps_than_an_epoch() -> None:
    lengths = [s for s in settings(replace(CPU, per_epoch=32)) if "train.steps_per_call" in s]

    assert lengths == [{"train.steps_per_call": 10}, {"train.steps_per_call": 32}]
    assert not any("train.steps_per_call" in s for s in settings(replace(CPU, steps_per_call=50)))


def test_a_first_pass_is_kept_only_where_it_may_stand_for_all() -> None:
    own = replace(CPU, own_dataset=True, image_store=None, batch_is_set=False)

    assert {"data.pipeline.cache": "memory"} not in settings(own)
    assert {"data.pipeline.cache": "memory"} in settings(replace(own, passes_agree=True))
    cached = replace(own, passes_agree=True, cached=True)
    assert {"data.pipeline.cache": "memory"} not in settings(cached)
    assert {"data.pipeline.batch_size": 128} in settings(own)


def test_strings_know_no_xla() -> None:
    assert not any("train.xla" in s for s in settings(replace(CPU, string_features=True)))


@pytest.mark.parametrize(
    ("situation", "precision"),
    [
        (CPU, "mixed_bfloat16"),
        (replace(CPU, precision="mixed_float16"), "float32"),
        (replace(CPU, precision="mixed_bfloat16"), "float32"),
        (replace(CPU, gpus=1), "mixed_bfloat16"),
        (replace(CPU, gpus=1, bfloat16=False), "mixed_float16"),
    ],
)
def test_the_other_precision_is_what_the_device_is_made_for(
    situation: Situation, precision: str
) -> None:
    assert other_precision(situation) == precision


def test_threads_are_a_cpus_business() -> None:
    assert lever(CPU, "train.intra_op_threads").changes_numbers
    for other in (replace(CPU, gpus=1), replace(CPU, cores=1), replace(CPU, intra_op_threads=2)):
        assert not any("train.intra_op_threads" in s for s in settings(other))


def test_replicas_may_send_less() -> None:
    assert lever(replace(CPU, replicas=2), "train.reduction_dtype").changes_numbers
    assert not any("train.reduction_dtype" in s for s in settings(CPU))


def test_another_batch_is_only_proposed() -> None:
    assert lever(CPU, "train.batch_size").only_proposed
    whole = [
        found
        for found in levers(replace(CPU, accumulate=4))
        if "train.accumulate" in found.settings
    ]
    assert [dict(found.settings) for found in whole] == [
        {"train.batch_size": 128, "train.accumulate": 1}
    ]
    assert not whole[0].only_proposed


def test_no_two_have_one_name() -> None:
    for situation in (CPU, replace(CPU, accumulate=4, replicas=2)):
        names = [found.name for found in levers(situation)]
        assert len(names) == len(set(names))
