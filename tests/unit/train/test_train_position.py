"""The position of a run, as a checkpoint stores it."""

from __future__ import annotations

from stoker.train.context.position import Position


def test_a_position_survives_a_checkpoint() -> None:
    position = Position(per_epoch=10, steps=30, step=7, steps_per_program=5)

    assert Position.from_json(position.to_json()) == position


def test_a_checkpoint_of_0_1_0_names_its_steps_per_program_together() -> None:
    stored = Position(per_epoch=10, steps=30, steps_per_program=5).to_json()
    stored["together"] = stored.pop("steps_per_program")

    assert Position.from_json(stored).steps_per_program == 5
