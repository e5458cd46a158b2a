"""Messages as JSON lines: what is in them, and what is not."""

from __future__ import annotations

import io
import json
import logging
import sys
import traceback
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

import pytest
import typer

from stoker.cli import main
from stoker.cli.main import app, invoke
from stoker.core import log_lines
from stoker.core.errors import EXIT_USER
from stoker.core.log_lines import HIDDEN, JsonStream, redacted


@pytest.fixture
def begin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], io.StringIO]]:
    """Makes a process with `--log-json` of this one; pytest sets its own stream before each test."""
    handlers = list(logging.getLogger().handlers)

    def enable() -> io.StringIO:
        stream = io.StringIO()
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setattr(log_lines, "_facts", {"run": "", "worker": ""})
        log_lines.enable({})
        return stream

    yield enable
    logging.captureWarnings(capture=False)
    for handler in list(logging.getLogger().handlers):
        if isinstance(handler.formatter, log_lines.JsonFormatter) and handler not in handlers:
            logging.getLogger().removeHandler(handler)


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_every_line_has_the_same_five_keys(begin: Callable[[], io.StringIO]) -> None:
    written = begin()
    log_lines.set_facts(run="r1")
    print("  train   12%  \n\nhalf", end="", file=sys.stderr)
    print(" a line ü", file=sys.stderr)
    logging.getLogger("stoker.train").warning("slow: %s", 3)
    log_lines.write_error("wrong\nin two lines")

    found = lines(written)

    assert [list(line) for line in found] == [list(log_lines.KEYS)] * 4
    assert [(line["level"], line["message"]) for line in found] == [
        ("info", "train   12%"),
        ("info", "half a line ü"),
        ("warning", "slow: 3"),
        ("error", "wrong\nin two lines"),
    ]
    assert {line["run"] for line in found} == {"r1"}
    assert all(datetime.fromisoformat(line["time"]).tzinfo for line in found)


def test_a_workers_line_keeps_its_own_level_and_run(begin: Callable[[], io.StringIO]) -> None:
    written = begin()
    own = json.dumps({"time": "t", "level": "warning", "run": "r1", "worker": "", "message": "m"})
    print(f"[worker 1] {own}", file=sys.stderr)
    print("[worker 2] Segmentation fault", file=sys.stderr)
    print(own, file=sys.stderr)
    print(json.dumps({"status": 200}), file=sys.stderr)
    print("{not json", file=sys.stderr)

    worker, crashed, same, access, text = lines(written)

    assert worker == json.loads(own) | {"worker": "1"}
    assert (crashed["worker"], crashed["message"]) == ("2", "Segmentation fault")
    assert same == json.loads(own)
    assert access["fields"] == {"status": 200}
    assert text["message"] == "{not json"


def test_every_verb_reports_a_wrong_option_as_json(begin: Callable[[], io.StringIO]) -> None:
    def verbs(group: Any, *path: str) -> Iterator[tuple[str, ...]]:
        for name, command in group.commands.items():
            is_group = hasattr(command, "commands")
            yield from verbs(command, *path, name) if is_group else [(*path, name)]

    written = begin()
    found = list(verbs(typer.main.get_command(app)))
    assert len(found) > 40
    for verb in found:
        start = len(lines(written))
        assert invoke([*verb, "--no-such-option"], debug=False) == EXIT_USER, verb
        said = lines(written)[start:]
        assert all(list(line) == list(log_lines.KEYS) for line in said), verb
        assert "No such option: --no-such-option" in said[-1]["message"], verb


def test_options_of_a_script_are_not_stokers(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []
    monkeypatch.setattr(main, "end_process", lambda _: None)
    monkeypatch.setattr(main, "invoke", lambda given, *, debug: calls.append([*given, str(debug)]))
    script = ["profile", "--", "train.py", "--debug", "--log-json"]
    monkeypatch.setattr(sys, "argv", ["stoker", *script])
    monkeypatch.delenv(log_lines.VARIABLE, raising=False)

    main.main()

    assert calls == [[*script, "False"]]
    assert not isinstance(sys.stderr, JsonStream)


def test_a_traceback_is_one_message_of_the_logging_call(begin: Callable[[], io.StringIO]) -> None:
    written = begin()
    try:
        raise ValueError("no")
    except ValueError:
        logging.getLogger("x").exception("failed")
        expected = traceback.format_exc().rstrip()

    (line,) = lines(written)

    assert (line["level"], line["message"]) == ("error", f"failed\n{expected}")


def test_a_program_reads_it_so_it_is_not_a_terminal(begin: Callable[[], io.StringIO]) -> None:
    written = begin()
    assert isinstance(sys.stderr, JsonStream)
    assert not sys.stderr.isatty()
    with pytest.raises(TypeError):
        sys.stderr.write(b"bytes")  # type: ignore[arg-type]  # on purpose the wrong type
    log_lines.enable({})
    print("once", file=sys.stderr)
    assert len(lines(written)) == 1


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("cannot open s3://key:p4ss@host/data", "p4ss"),
        ("https://user@example.com/x", "user"),
        ("Authorization: Bearer abc.def-ghi", "abc.def-ghi"),
        ("authorization: Basic dXNlcjpwYXNz", "dXNlcjpwYXNz"),
        ("Received: password=hunter2, port=5", "hunter2"),
        ('{"api_key": "0123abcd"}', "0123abcd"),
        ("GET /x?X-Amz-Signature=deadbeef&a=1", "deadbeef"),
        ("AWS_SECRET_ACCESS_KEY=wJalrXUtnFEMI", "wJalrXUtnFEMI"),
        ("id AKIAIOSFODNN7EXAMPLE is invalid", "AKIAIOSFODNN7EXAMPLE"),
        ("HF_TOKEN: hf_abcdefghijklmnopqrst", "hf_abcdefghijklmnopqrst"),
        ("pushed with ghp_abcdefghijklmnopqrst", "ghp_abcdefghijklmnopqrst"),
        ("SharedAccessSignature = sv2020sig", "sv2020sig"),
    ],
)
def test_no_secret_is_written(begin: Callable[[], io.StringIO], text: str, secret: str) -> None:
    written = begin()
    print(text, file=sys.stderr)

    (line,) = lines(written)

    assert secret not in written.getvalue()
    assert HIDDEN in line["message"]


def test_what_is_not_a_secret_stays() -> None:
    for text in (
        "token 5 of 9, secret santa, https://example.com/a:b@c",
        "epoch 3/10, step 1,250/4,000, 12.3 ms/step, loss 0.3123",
        "the tokenizer: words; a password must be set",
        "https://example.com:8080/v1/models",
    ):
        assert redacted(text) == text
