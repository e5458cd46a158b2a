from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from stoker.core.config import build, parse_yaml, read_yaml, with_overrides
from stoker.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Inner:
    batch_size: int | Literal["auto"] = "auto"
    rate: float = 0.1

    def __post_init__(self) -> None:
        if self.rate <= 0:
            raise ConfigError("train.rate must be above 0", got=self.rate)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outer:
    name: str
    train: Inner = field(default_factory=Inner)
    tags: tuple[str, ...] = ()
    size: tuple[int, int] | None = None
    gates: dict[str, Inner] = field(default_factory=dict)
    home: Path = Path()


def test_plain_values_become_nested_frozen_dataclasses() -> None:
    raw = {"name": "a", "train": {"batch_size": 4}, "tags": ["x"], "size": [1, 2], "home": "h"}

    assert build(Outer, raw) == Outer(
        name="a", train=Inner(batch_size=4), tags=("x",), size=(1, 2), home=Path("h")
    )


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ({"nam": "a"}, "nam is not a setting. Did you mean 'name'?"),
        ({"name": "a", "train": {"batchsize": 1}}, "train.batchsize is not a setting"),
        ({"name": "a", "rate": 1}, "rate is not a setting. Did you mean 'train.rate'?"),
        ({}, "name must be given"),
        ({"name": 3}, "name must be text. Received: 3."),
        ({"name": "a", "train": []}, "train must be a section"),
        ({"name": "a", "train": {"batch_size": "big"}}, "train.batch_size must be"),
        ({"name": "a", "train": {"batch_size": True}}, "train.batch_size must be"),
        ({"name": "a", "train": {"rate": "fast"}}, "train.rate must be a number. Received: 'fast'"),
        ({"name": "a", "train": {"rate": float("nan")}}, "train.rate must be a number"),
        ({"name": "a", "train": {"rate": "nan"}}, "train.rate must be a number"),
        ({"name": "a", "train": {"rate": 10**400}}, "train.rate must be a number"),
        ({"name": False}, "Write it in quotes if it is text."),
        ({"name": "a", "train": {"rate": -1}}, "train.rate must be above 0"),
        ({"name": "a", "tags": "x"}, "tags must be a list"),
        ({"name": "a", "size": [1, 2, 3]}, "size must hold 2 values"),
        ({"name": "a", "gates": {"auc": {"rat": 1}}}, "gates.auc.rat is not a setting"),
    ],
)
def test_a_wrong_setting_is_named_with_rule_value_and_remedy(
    raw: dict[str, object], said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        build(Outer, raw)

    assert said in caught.value.line()
    assert "\n" not in caught.value.line()


def test_a_number_that_yaml_reads_as_text_is_still_a_number() -> None:
    assert build(Outer, {"name": "a", "train": {"rate": "1e-3"}}).train.rate == pytest.approx(1e-3)


def test_a_span_of_steps_is_a_text_and_no_number_to_the_base_60() -> None:
    assert with_overrides({}, ["a=20:30", "b=12", "c=-1.5e+3", "d=1:30.5"]) == {
        "a": "20:30",
        "b": 12,
        "c": -1500.0,
        "d": "1:30.5",
    }


def test_overrides_reach_into_sections_and_leave_the_original_alone() -> None:
    raw = {"train": {"epochs": 3}}

    changed = with_overrides(raw, ["train.epochs=5", "train.xla=true", "new.key=[1, 2]"])

    assert changed == {"train": {"epochs": 5, "xla": True}, "new": {"key": [1, 2]}}
    assert raw == {"train": {"epochs": 3}}


@pytest.mark.parametrize("assignment", ["train.epochs", "=3", "a..b=1", "train.epochs.x=1"])
def test_an_assignment_of_another_form_is_refused(assignment: str) -> None:
    with pytest.raises(ConfigError):
        with_overrides({"train": {"epochs": 3}}, [assignment])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: [1", "must be YAML"),
        ("- a", "must hold `key: value` lines"),
        ("", "must hold `key: value` lines"),
        ("a: 1\na: 2", "occurs twice"),
        ("a: !!python/object/apply:os.system [ls]", "must be YAML"),
        ("a:\n  b: 2026-13-45", r"line 2, column 6\).*'2026-13-45' cannot be read as timestamp"),
        ("a: 2001-12-14T21:59:43-99:30", "cannot be read as timestamp"),
        ("a: !!int x", "'x' cannot be read as int"),
        ("a: !!int ''", "cannot be read as int"),
        ("a: !!bool x", "cannot be read as bool"),
        ("a: !!float x", "cannot be read as float"),
        ("a: !!timestamp x", "cannot be read as timestamp"),
        ("a: 0x_", "cannot be read as int"),
        ("a: 0b_", "cannot be read as int"),
        ("a: " + "9" * 5000, "line 1, column 4"),
        ("a: 0x" + "F" * 5000, "does not fit 64 bits"),
        ("a: 9223372036854775808", "does not fit 64 bits"),
        ("a: 010", "octal in YAML 1.1 and decimal in YAML 1.2"),
        ("a: -00_7", "octal in YAML 1.1 and decimal in YAML 1.2"),
        (r'a: "\UFFFFFFFF"', "must be YAML .line 1"),
        (r'a: "\uD800"', "half of a surrogate pair"),
        (r'a: "\uDE00\uD83D"', "half of a surrogate pair"),
        (r'a: "\uD83D\uDE00\uD83D"', "half of a surrogate pair"),
        (r'{"\uD83D\uDE00": 1, "\U0001F600": 2}', "occurs twice"),
        (r'a: "\0"', "a NUL character"),
        ("a: 1\nb: \x07", r"line 2\).*'\\x07'"),
        ("a: &a {b: *a}", "a value that contains itself"),
        ("? [a]\n: 1", "unhashable key"),
        ("a: " + "[" * 101, "more than 100 values inside each other"),
        ("k0: &k0 []\n" + "".join(f"k{n}: &k{n} [*k{n - 1}]\n" for n in range(1, 2000)), "inside"),
        ("a: &a [" + "1, " * 400 + "]\nb: &b [" + "*a, " * 400 + "]", "more than 100,000 values"),
    ],
)
def test_a_file_that_is_not_a_mapping_is_refused(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "stoker.yaml"
    file.write_text(text)

    with pytest.raises(ConfigError, match=said):
        read_yaml(file)


@pytest.mark.parametrize("character", ["\x85", "\u2028", "\u2029"])
def test_a_line_break_that_editors_do_not_show_is_refused_unless_escaped(character: str) -> None:
    with pytest.raises(ConfigError, match=rf"line 2\) .*U\+{ord(character):04X}\."):
        parse_yaml(f"a: 1\nb: 2 # note{character}c: 3\n", "x.yaml")

    assert parse_yaml(f'a: "\\u{ord(character):04x}"', "x.yaml") == {"a": character}


def test_a_section_tagged_as_a_number_is_one_line() -> None:
    with pytest.raises(ConfigError, match=r"x\.yaml must be YAML \(line 1, column 4\)"):
        parse_yaml("a: !!int {b: 1}\n", "x.yaml")


def test_what_json_writes_as_a_surrogate_pair_is_one_character() -> None:
    value = {
        "\N{GRINNING FACE}": ["a\N{GRINNING FACE}\N{PARTY POPPER}", "\ufeffb\N{GRINNING FACE}"]
    }

    assert parse_yaml(json.dumps(value), "it") == value


def test_zeros_are_not_an_octal_number() -> None:
    assert parse_yaml("[00, 000, -00, 0_0, 0]", "it") == [0] * 5


def test_a_key_that_a_merge_brings_does_not_stand_twice() -> None:
    text = "a: {b: &x {<<: {k: 1}, k: 2}}\nc: {<<: *x, k: 3}"

    assert parse_yaml(text, "it") == {"a": {"b": {"k": 2}}, "c": {"k": 3}}


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"stoker\.yaml must be a file"):
        read_yaml(tmp_path / "stoker.yaml")


@dataclass(frozen=True, kw_only=True)
class Box:
    width: int
    height: int = 1


@dataclass(frozen=True, kw_only=True)
class Ball:
    radius: int


@dataclass(frozen=True, kw_only=True)
class Parcel:
    what: Box | Ball | str


def test_one_of_several_sections_is_recognized_by_its_keys() -> None:
    assert build(Parcel, {"what": {"radius": 2}}).what == Ball(radius=2)
    assert build(Parcel, {"what": {"width": 2}}).what == Box(width=2)
    assert build(Parcel, {"what": Ball(radius=2)}).what == Ball(radius=2)
    assert build(Parcel, {"what": "a:b"}).what == "a:b"
    with pytest.raises(ConfigError, match=r"what\.radius must be a whole number"):
        build(Parcel, {"what": {"radius": "wide"}})
    with pytest.raises(ConfigError, match=r"what\.raduis is not a setting.*'radius'"):
        build(Parcel, {"what": {"radius": 2, "raduis": 2}})
    with pytest.raises(ConfigError, match=r"what must be a section of .* or text"):
        build(Parcel, {"what": 3})
