"""Which levers there are in which situation, and in which order."""

from __future__ import annotations

import pytest
from tests.unit.tune.situations import CACHED, OWN_DATASET, PLAIN, SERVED, changed, gpus

from stoker.tune.levers import Lever, Situation, data_service, levers, other_precision

CPU = changed(PLAIN, image_store="original", cpu_cores=8, per_epoch=200, made_here=True)
OWN = changed(CPU, data=OWN_DATASET, image_store=None)


def settings(situation: Situation) -> list[dict[str, object]]:
    return [dict(lever.settings) for lever in levers(situation)]


def lever(situation: Situation, name: str) -> Lever:
    (found,) = (lever for lever in levers(situation) if name in lever.settings)
    return found


def test_a_lever_comes_before_those_that_depend_on_it() -> None:
    parts = [lever.part for lever in levers(CPU)]

    assert parts == sorted(parts, key=["input", "python", "step"].index)
    assert settings(CPU) == [
        {"data.images.store": "resized"},
        {"data.images.store": "raw"},
        {"train.feed.decoder": "opencv"},
        {"train.feed.threads": 4},
        {"train.feed.threads": 16},
        {"train.feed.parallel_batches": 4},
        {"train.feed.prefetch": 32},
        {"train.steps_per_call": 10},
        {"train.steps_per_call": 50},
        {"train.precision": "mixed_bfloat16"},
        {"train.xla": True},
        {"train.intra_op_threads": 4},
        {"train.inter_op_threads": 4},
        {"train.batch_size": 128},
    ]


def test_a_call_has_no_more_steps_than_an_epoch() -> None:
    lengths = [s for s in settings(changed(CPU, per_epoch=32)) if "train.steps_per_call" in s]

    assert lengths == [{"train.steps_per_call": 10}, {"train.steps_per_call": 32}]
    assert not any("train.steps_per_call" in s for s in settings(changed(CPU, steps_per_call=50)))


def test_the_first_pass_is_cached_only_if_all_passes_are_equal() -> None:
    assert {"data.pipeline.cache": "memory"} not in settings(OWN)
    assert {"data.pipeline.cache": "memory"} in settings(changed(OWN, passes_agree=True))
    cached = changed(OWN, passes_agree=True, data=CACHED)
    assert {"data.pipeline.cache": "memory"} not in settings(cached)
    assert {"data.pipeline.batch_size": 128} in settings(OWN)


def test_xla_is_not_tried_with_string_features() -> None:
    assert not any("train.xla" in s for s in settings(changed(CPU, string_features=True)))


@pytest.mark.parametrize(
    ("situation", "precision"),
    [
        (CPU, "mixed_bfloat16"),
        (changed(CPU, precision="mixed_float16"), "float32"),
        (changed(CPU, precision="mixed_bfloat16"), "float32"),
        (changed(CPU, gpus=gpus(1)), "mixed_bfloat16"),
        (changed(CPU, gpus=gpus(1, capability=(7, 0))), "mixed_float16"),
    ],
)
def test_the_other_precision_is_what_the_device_is_made_for(
    situation: Situation, precision: str
) -> None:
    assert other_precision(situation.resolved.precision, situation.devices.gpus) == precision


def test_threads_of_operations_are_tried_only_on_a_cpu() -> None:
    assert lever(CPU, "train.intra_op_threads").changes_numbers
    for other in (
        changed(CPU, gpus=gpus(1)),
        changed(CPU, cpu_cores=1),
        changed(CPU, intra_op_threads=2),
    ):
        assert not any("train.intra_op_threads" in s for s in settings(other))


def test_parallel_operations_are_tried_only_with_one_replica_on_a_cpu() -> None:
    name = "train.inter_op_threads"
    assert lever(CPU, name).changes_numbers
    for other in (
        changed(CPU, gpus=gpus(1)),
        changed(CPU, cpu_cores=1),
        changed(CPU, inter_op_threads=2),
        changed(CPU, replicas=2),
    ):
        assert not any(name in each for each in settings(other))


def names(situation: Situation) -> set[str]:
    return {name for each in settings(situation) for name in each if "feed" in name}


def test_levers_of_the_feed_apply_only_if_this_process_makes_batches() -> None:
    of_all = {"train.feed.threads", "train.feed.prefetch"}
    of_images = {"train.feed.decoder", "train.feed.parallel_batches"}

    assert names(CPU) == of_all | of_images
    assert names(OWN) == of_all | {"train.feed.autotune"}
    assert names(changed(OWN, gpus=gpus(1))) == of_all | {"train.feed.autotune", "train.feed.slack"}
    for other in (CPU, OWN):
        assert names(changed(other, made_here=False)) == set()
    # What is set already is not tried again.
    assert (
        names(changed(CPU, threads=2, parallel_batches=2, prefetch=8, image_store="raw")) == set()
    )
    assert (
        names(changed(OWN, threads=2, prefetch=8, autotune=False, slack=True, gpus=gpus(1)))
        == set()
    )
    assert dict(lever(changed(CPU, decoder="opencv"), "train.feed.decoder").settings) == {
        "train.feed.decoder": "native"
    }


def test_more_at_once_needs_an_idle_core_and_is_judged_by_speed() -> None:
    found = {tuple(each.settings.items()): each for each in levers(CPU) if each.part == "input"}

    idle = {settings for settings, each in found.items() if each.does_more_at_once}
    assert idle == {
        (("train.feed.threads", 16),),
        (("train.feed.parallel_batches", 4),),
        (("train.feed.prefetch", 32),),
    }
    by_cpu = {settings[0][0] for settings, each in found.items() if not each.by_speed}
    assert by_cpu == {"data.images.store", "train.feed.decoder"}


def test_values_that_are_bytes_may_be_sent_as_uint8() -> None:
    pixels = changed(OWN, byte_features={"image": "x/255"})

    assert dict(lever(pixels, "train.feed.uint8").settings) == {
        "train.feed.uint8": {"image": "x/255"}
    }
    assert not lever(pixels, "train.feed.uint8").changes_numbers
    # From memory there is nothing to send but to a GPU.
    assert "train.feed.uint8" not in names(changed(pixels, made_here=False))
    assert "train.feed.uint8" in names(changed(pixels, made_here=False, gpus=gpus(1)))


def test_replicas_may_send_less() -> None:
    assert lever(changed(CPU, replicas=2), "train.reduction_dtype").changes_numbers
    assert not any("train.reduction_dtype" in s for s in settings(CPU))


def test_exchanging_less_often_is_only_proposed() -> None:
    passes = lever(changed(CPU, replicas=2), "train.accumulate")

    assert passes.settings == {"train.accumulate": 4}
    assert passes.only_proposed
    assert passes.only_for == "communication"
    for other in (CPU, changed(CPU, replicas=2, accumulate=2), changed(OWN, replicas=2)):
        assert {"train.accumulate": 4} not in settings(other)


def test_packs_are_tried_only_if_gradients_are_computed_one_after_the_other() -> None:
    pair = changed(CPU, replicas=2)
    name = "train.reduction_bytes_per_pack"

    found = [each for each in levers(pair) if name in each.settings]

    assert [each.settings[name] for each in found] == [32 << 20, 8 << 20]
    assert {each.only_for for each in found} == {"communication"}
    assert not any(each.changes_numbers for each in found)
    # Of three numbers and more the order of the sum is the pack's.
    four = changed(CPU, replicas=4)
    assert all(each.changes_numbers for each in levers(four) if name in each.settings)
    for other in (
        CPU,
        changed(pair, xla=True),
        changed(pair, accumulate=2),
        changed(pair, reduction_bytes_per_pack=1 << 20),
        changed(pair, gradient_bytes=2 << 20, reduction_bytes_per_pack=1),
        changed(pair, gradient_bytes=1 << 20),
    ):
        assert not any(name in each for each in settings(other))
    small = changed(pair, gradient_bytes=(4 << 20) - 1)
    assert [each[name] for each in settings(small) if name in each] == [2 << 20]


def test_another_batch_is_only_proposed() -> None:
    assert lever(CPU, "train.batch_size").only_proposed
    whole = [
        found
        for found in levers(changed(CPU, accumulate=4))
        if "train.accumulate" in found.settings
    ]
    assert [dict(found.settings) for found in whole] == [
        {"train.batch_size": 128, "train.accumulate": 1}
    ]
    assert not whole[0].only_proposed


def test_all_levers_have_different_names() -> None:
    for situation in (CPU, changed(CPU, accumulate=4, replicas=2)):
        names = [found.name for found in levers(situation)]
        assert len(names) == len(set(names))


def test_several_devices_are_tried_as_one_with_as_many_samples_a_step() -> None:
    several = changed(CPU, strategy="mirrored", replicas=2, gpus=gpus(2), batch_size=32)

    assert dict(lever(several, "train.strategy").settings) == {
        "train.strategy": "one_device",
        "train.replicas": "auto",
        "train.batch_size": 64,
    }
    one = changed(several, strategy="one_device", replicas=1)
    assert dict(lever(one, "train.strategy").settings) == {
        "train.strategy": "mirrored",
        "train.batch_size": 16,
    }
    for kept in (CPU, changed(one, batch_size=33), changed(several, strategy="tpu")):
        assert not any("train.strategy" in each for each in settings(kept))


def test_rematerialization_is_tried_only_after_a_lever_ran_out_of_memory() -> None:
    deep = changed(CPU, accumulate=2, blocks=("encoder", "decoder"))

    found = {each.name: each for each in levers(deep) if "train.remat" in each.settings}

    assert {each.after_memory_of for each in found.values()} == {
        "no accumulation: the whole batch in one pass",
        "4 times the batch",
    }
    for each in found.values():
        assert each.settings["train.remat"] == ["encoder", "decoder"]
        assert each.changes_numbers
    assert not any("train.remat" in each for each in settings(changed(deep, blocks=())))


def test_a_data_service_is_proposed_only_to_a_machine_that_has_no_core_left() -> None:
    found = data_service(CPU, cores_used=7.5, busy_fraction=0.25)

    assert found is not None
    assert found.only_proposed
    assert "7.5 of this machine's 8 cores" in found.why
    assert "at most 4 times" in found.why
    assert data_service(CPU, cores_used=1.2, busy_fraction=0.25) is None
    for other in (changed(CPU, data=OWN_DATASET), changed(CPU, data=SERVED)):
        assert data_service(other, cores_used=8.0, busy_fraction=0.25) is None
