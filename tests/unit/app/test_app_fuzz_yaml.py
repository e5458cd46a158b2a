"""`stoker.yaml` with anything in it: an experiment, or one line that names file, line and key."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from stoker.app.experiment import FILE, Experiment, load_experiment
from stoker.core.config import build
from stoker.core.errors import ConfigError, UserError
from stoker.data.sources.source import list_source

ALWAYS_THE_SAME = "STOKER_FUZZ_EXAMPLES" not in os.environ
"""`make soak` draws new examples; a finding there is kept here."""

EXAMPLES = int(os.environ.get("STOKER_FUZZ_EXAMPLES", "150"))
"""About 7 s for both tests; `make soak` sets more."""

RECIPES = Path(__file__).resolve().parents[3] / "recipes"


def settings_of(cls: Any, where: str = "") -> Iterator[str]:
    """The dotted name of every setting and section below a configuration's dataclass."""
    for name, hint in typing.get_type_hints(cls).items():
        yield where + name
        union = typing.get_origin(hint) in (typing.Union, types.UnionType)
        for choice in typing.get_args(hint) if union else (hint,):
            if dataclasses.is_dataclass(choice):
                yield from settings_of(choice, f"{where}{name}.")


SETTINGS = sorted(set(settings_of(Experiment)) - {"folder"})

SCALARS = st.sampled_from(
    """
    0 -1 1 2 32 007 0o17 0x1F 0b11 0x_ 0b_ 1_000 _1 +1 1e3 1e-3 1.5 .5 -.5 1e400 -1e400 .inf -.inf .nan
    .NaN NaN inf nan Infinity 9223372036854775807 9223372036854775808 18446744073709551616 1:30 20:30:40
    yes no Yes NO on off y n true False null ~ auto none 'auto' "text" train.csv a:b a:b:c model:build
    2026-01-31 2026-13-45 2026-01-31T25:61:61Z 2001-12-14t21:59:43.10-99:30 2026-01-31T00:00:00Z
    !!int !!int${empty} !!int${x} !!float${x} !!bool${x} !!timestamp${x} !!null${x} !!binary${x}
    !!binary${AAAA} !!set${{a,b}} !!omap${[a:1]} !!pairs${[a:1]} !!str${1} !!seq${{}} !!map${[]} !x${1}
    !!python/object/apply:os.system${[ls]} !!python/name:os.system
    [] [1] [1,2] [1,2,3] [a,b] [[]] [null] [.nan] {} {a:1} {a:} {1:2} {yes:1} {[a]:1} {{a:1}:1} {a:1,a:2}
    {?a:1} {train:0.8,eval:0.2} {train:.nan,eval:0.2} {train:1,eval:0} {auc:{min:.nan}} {auc:{min:0.9}}
    {min:0} {<<:{a:1}} {<<:1} {<<:[{a:1},{b:2}]} {<<:[1]} &a *a &a${1} &a${[*a]} &a${{b:*a}} &a${{<<:*a}}
    "\\0" "\\uD800" "\\uDC00x" "\\n" "a\\tb" "\\x7f" "\\UFFFFFFFF" "" '' ' ' / . .. ../.. ~/x ~nobody/x
    file:///x s3:// s3://b s3://b/k gs://b/** http://x ** [ ] { } , : - ? | > ' " % @ ` # & * ! |2 >- |+
    """.replace("${empty}", "${''}").split()
).map(
    lambda text: text.replace("${", " ").removesuffix("}") if "${" in text else text
) | st.sampled_from(
    [
        "9" * 5000,
        "0x" + "F" * 5000,
        "1" + "0" * 400,
        "[" * 2000,
        "{a: " * 2000,
        "a" * 5000,
        "'" + "a" * 300,
        "\t1",
        "1 \t# x",
        "a: b: c",
        "- a\n- b",
        "\u00a0",
        "\u2028",
        "\ufeff",
        "\x07",
        "\x85",
        "\ud800",
        "日本",
        "🙂",
        "\\t",
    ]
)
"""What may stand after a setting's colon: right, strange and broken."""

SCALARS |= st.text(max_size=8) | st.integers().map(str) | st.floats().map(str)

NO_YAML = re.compile(
    r"must be (YAML|UTF-8 text) \(line \d+|must be at most 1 MiB|must hold `key: value` lines"
)
"""Messages on a file of which no key can be read."""

BROKEN = st.sampled_from(
    [
        b"\t", b"\xff", b"\xc3", b"\xed\xa0\x80", b"\0", b"\r", b"\n", b"\n\n", b" ", b":", b"- ", b"? ",
        b"---\n", b"\n...\n", b"\n---\na: 1\n", b"%YAML 1.2\n---\n", b"%TAG ! x\n", b"\xef\xbb\xbf",
        b"\xff\xfe", b"<<: *a\n", b"&a ", b"*a", b"[", b"]", b"{", b"}", b"|\n", b">\n", b"'", b'"', b"#",
        b"!!int ", b"!!python/object:os.x ", b",", b"\xc2\x85", b"\xe2\x80\xa8", b"name: again\n", b"1: 2\n",
        b"yes: 1\n", b"? [a]\n: b\n", b"\x1b[31m",
    ]
)  # fmt: skip


def written(raw: dict[str, Any], depth: int = 0) -> Iterator[tuple[str, str]]:
    """The lines of a document, each with the dotted key that begins there."""
    for key, value in raw.items():
        if isinstance(value, dict):
            yield key, "  " * depth + f"{key}:"
            for inner, line in written(value, depth + 1):
                yield f"{key}.{inner}", line
        else:
            yield key, "  " * depth + f"{key}: {value}"


BASE: dict[str, Any] = {
    "name": "x",
    "data": {"source": "data.csv"},
    "model": "model:build",
    "label": "y",
}


@st.composite
def documents(draw: Any) -> tuple[list[str], bytes]:
    """One setting of a right document has a strange value: the key of each line, and the file."""
    name, value = draw(st.sampled_from(SETTINGS)), draw(SCALARS)
    raw: dict[str, Any] = {**BASE, "data": dict(BASE["data"])}
    if name.startswith(("data.dataset", "data.options", "data.pipeline")):
        raw = {"name": "x", "data": {"dataset": "model:dataset"}, "model": "model:build"}
    where = raw
    *sections, last = name.split(".")
    for section in sections:
        where = where.setdefault(section, {})
    where[last] = value
    keys, lines = zip(*written(raw), strict=True)
    return list(keys), "".join(f"{line}\n" for line in lines).encode(errors="surrogatepass")


@st.composite
def damaged(draw: Any) -> bytes:
    """A recipe's file with a few bytes gone, doubled or others in their place."""
    recipe = draw(st.sampled_from(sorted(RECIPES.glob("*/stoker.yaml"))))
    text = recipe.read_bytes()
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(text)))
        end = min(len(text), at + draw(st.sampled_from([0, 0, 1, 5, 40])))
        put = draw(st.one_of(BROKEN, st.just(text[at : end + 30]), st.binary(max_size=3)))
        text = text[:at] + put + text[end:]
    return text


def loaded(folder: Path, raw: bytes) -> Experiment | str:
    """The experiment, or the one line that says why there is none."""
    (folder / FILE).write_bytes(raw)
    try:
        return load_experiment(folder)
    except ConfigError as error:
        line = error.line()
    assert len(line) < 1000
    assert line.isprintable()
    assert line.encode()
    return line


def check_usable(experiment: Experiment) -> None:
    """Hold what the stages rely on, as far as they need neither data nor user code."""
    text = json.dumps(experiment.to_json())
    assert json.dumps(build(Experiment, json.loads(text)).to_json()) == text
    str(experiment.runs_root).encode()
    if experiment.own_dataset is None and "://" not in experiment.files.source:
        with contextlib.suppress(UserError):
            list_source(experiment.files)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("experiment")
    (made / "data.csv").write_text("x,y\n1,0\n")
    return made


@settings(
    derandomize=ALWAYS_THE_SAME, max_examples=EXAMPLES, suppress_health_check=list(HealthCheck)
)
@given(documents())
@example((["name", "data", "model"], b"name: x\ndata: " + b"a" * 5000 + b"\nmodel: model:build\n"))
@example((["name", "data", "model"], b"name: x\ndata: \n?\nmodel: model:build\n"))
@example((["name", "label", "evaluate"], b"name: x\nlabel: y\nevaluate: \xc2\x850:\n"))
@example((["name", "data", "data.workers"], b"name: x\ndata:\n  workers: \xc2\x850:\n"))
@example((["name", "label", "train"], "name: x\nlabel: y # \u2028train: {no: 1}\n".encode()))
def test_a_strange_value_is_a_setting_or_an_error_that_names_its_key_and_line(
    folder: Path, document: tuple[list[str], bytes]
) -> None:
    keys, raw = document

    found = loaded(folder, raw)

    if isinstance(found, Experiment):
        check_usable(found)
    elif NO_YAML.search(found) is None:
        named = re.search(rf"{FILE}, line (\d+): (.*)", found)
        assert named or "must be given" in found, found
        assert named is None or keys[int(named[1]) - 1] in named[2], found


def laughs(item: str, again: str) -> bytes:
    """Twenty-five lines that hold more values than the memory."""
    first = f"name: &n0 {item}\n"
    return (
        first + "".join(f"k{n}: &n{n} {again.replace('@', f'*n{n - 1}')}\n" for n in range(1, 25))
    ).encode()


@settings(
    derandomize=ALWAYS_THE_SAME, max_examples=EXAMPLES, suppress_health_check=list(HealthCheck)
)
@given(damaged())
@example(laughs("[x]", "[@, @]"))
@example(laughs("{a: x}", "{a: @, b: @}"))
@example(laughs("{a: x}", "{<<: [@, @]}"))
@example(b"data: &a {source: *a}\n")
@example(b"n\xef\xbb\xbfame: x\n")
@example(b"data: &a [*a]\n")
@example(b"!!int {name: x}\n")
@example(b"name: !!float [1]\n")
@example(b"data: &a {<<: *a}\n")
@example(b"#" * (1 << 20) + b"\n")
@example(b"a: " + b"[" * 100_000)
@example(b"a: " * 100_000)
@example(b"- " * 100_000)
def test_a_damaged_file_is_an_experiment_or_one_line_that_names_it(
    folder: Path, raw: bytes
) -> None:
    found = loaded(folder, raw)

    if isinstance(found, Experiment):
        check_usable(found)
    else:
        assert str(folder / FILE) in found
