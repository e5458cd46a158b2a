"""Parses JSON as TensorFlow Serving does, with its error messages.

Source: TensorFlow Serving's `json_tensor.cc`; for the messages of parse errors, RapidJSON.
"""

from __future__ import annotations

import base64
import json
import math
import re
from typing import Any

import simdjson

from stoker.serve.errors import Code, ServeError

_LARGE_EXPONENT = re.compile(rb"[eE]\+?\d{3}")
_DIGITS_AS_ZERO = bytes.maketrans(b"123456789", b"0" * 9)
_MANY_DIGITS = b"0" * 300
"""A number beyond the range of a double has an exponent of at least three digits, or at least this many digits."""

_TOO_BIG = "Number too big to be stored in double."

_RAPIDJSON = {
    "Expecting value": "Invalid value.",
    "Expecting property name enclosed in double quotes": "Missing a name for object member.",
    "Expecting ':' delimiter": "Missing a colon after a name of object member.",
    "Expecting ',' delimiter": "Missing a comma or } after an object member.",
    "Extra data": "The document root must not be followed by other values.",
    "Unterminated string starting at": "Missing a closing quotation mark in string.",
    "Invalid control character at": "Invalid encoding in string.",
    "Invalid \\escape": "Invalid escape character in string.",
    "Invalid \\uXXXX escape": "Incorrect hex digit after \\u escape in string.",
    "Illegal trailing comma before end of object": "Missing a name for object member.",
    "Illegal trailing comma before end of array": "Invalid value.",
}
"""Python's message for a parse error -> RapidJSON's."""


def parse_object(raw: bytes) -> tuple[dict[str, Any], str]:
    """Parse a body; return its object and its `signature_name` ("" if missing).

    Raises:
        ServeError: the body is not JSON or not an object, or its `signature_name` is not a string.
    """
    return as_object(parse_json(raw))


def as_object(body: Any) -> tuple[dict[str, Any], str]:
    """Check a parsed body as `parse_object` does."""
    if not isinstance(body, dict):
        raise invalid(f"JSON Value: {shown(body)} Is not object")
    signature = body.get("signature_name", "")
    if not isinstance(signature, str):
        raise invalid(
            f"JSON Value: {shown(body)} not formatted correctly. "
            "'signature_name' key must be a string value."
        )
    return body, signature


def parse_json(raw: bytes) -> Any:
    """Parse JSON in UTF-8; NaN, Infinity and -Infinity are allowed.

    Raises:
        ServeError: the text is not JSON, or nested too deeply.
    """
    if not raw:
        raise _unparsed("The document is empty")
    try:
        # Python reads 1e999 as infinity. The hook that refuses such numbers is slow, and rarely needed.
        if _may_be_huge(raw):
            return json.loads(raw.decode(), parse_float=_finite, parse_int=_in_range)
        return json.loads(raw.decode())
    except UnicodeDecodeError as error:
        raise _unparsed(f"Invalid encoding in string. at offset: {error.start}") from error
    except json.JSONDecodeError as error:
        raise _unparsed(_parse_error(error)) from error
    except RecursionError as error:
        raise _unparsed("nested too deeply") from error
    except ValueError as error:  # an integer with more digits than Python accepts
        raise _unparsed(_TOO_BIG) from error


class QuickJson:
    """A reusable simdjson parser for small bodies, for use in one thread.

    It takes a third of the time of Python's parser.
    """

    def __init__(self) -> None:
        """Create the parser. Between bodies, it keeps only its memory."""
        self._parser = simdjson.Parser()

    def parse(self, raw: bytes) -> Any:
        """Parse a body; if simdjson does not accept it, `parse_json` parses it.

        Raises:
            ServeError: the body is not JSON, or nested too deeply.
        """
        if not raw.startswith(b"{"):  # simdjson would ignore, for example, a byte order mark
            return parse_json(raw)
        try:
            # The parsed object refers to the parser's memory; `as_dict` copies it, and the object is freed.
            return self._parser.parse(raw).as_dict()  # type: ignore[union-attr] # it is an object
        except (ValueError, RuntimeError, RecursionError):  # simdjson does not accept it
            self._parser = simdjson.Parser()  # a new one: the error may hold objects of the old one
            return parse_json(raw)


def _may_be_huge(raw: bytes) -> bool:
    """Return whether a number may be beyond the range of a double.

    For an image of 1.3 MB, a single regular expression would take several times as long.
    """
    return _MANY_DIGITS in raw.translate(_DIGITS_AS_ZERO) or _LARGE_EXPONENT.search(raw) is not None


def shown(value: Any) -> str:
    """Return a value for an error message: on one line, and shortened if it is long."""
    text = ""
    try:
        for part in json.JSONEncoder().iterencode(value):  # only the part that is shown
            text += part
            if len(text) > _SHOWN_CHARS:
                return text[:_SHOWN_CHARS] + "..."
    except (ValueError, RecursionError):  # an integer with more digits than Python prints
        return json_type(value)
    return text


_SHOWN_CHARS = 400
"""Maximum number of characters of a value in an error message; TensorFlow Serving repeats the whole value."""


def json_type(value: Any) -> str:
    """Return RapidJSON's name of a value's JSON type."""
    if isinstance(value, bool):
        return str(value)
    names = {type(None): "Null", dict: "Object", list: "Array", str: "String"}
    return names.get(type(value), "Number")


def is_b64(value: Any) -> bool:
    """Whether a value is `{"b64": "..."}`: bytes, not an object that names tensors."""
    return isinstance(value, dict) and value.keys() == {"b64"} and isinstance(value["b64"], str)


_SPACE = str.maketrans("", "", " \t\n\v\f\r")
_BASE64 = re.compile(r"([A-Za-z0-9+/]*)([=.]*)")
_PADDING = (0, None, 2, 1)
"""Length of the last, incomplete group of four characters -> number of padding characters that it needs. None: invalid,
because a single character is less than a byte."""


def base64_bytes(text: str) -> bytes:
    """Decode base64.

    White space is ignored. Padding may be omitted; if present, it must be complete, and may be
    dots. Bits of the last character that do not fill a byte may be set.

    Raises:
        ServeError: the text is not valid base64.

    Source: Abseil, `absl::Base64Unescape`, which TensorFlow Serving calls.
    """
    found = _BASE64.fullmatch(text.translate(_SPACE))
    if found is None:
        raise invalid("Unable to base64 decode")
    padding = _PADDING[len(found[1]) % 4]
    if padding is None or len(found[2]) not in (0, padding):
        raise invalid("Unable to base64 decode")
    return base64.b64decode(found[1] + "=" * padding)


def invalid(message: str) -> ServeError:
    """Return an error that the client has to fix."""
    return ServeError(Code.INVALID_ARGUMENT, message)


def _in_range(text: str) -> int:
    _finite(text)
    return int(text)


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(_TOO_BIG)
    return number


_LOOK_BACK_CHARS = 100_000
"""Number of characters that are searched backwards for the list or object in which an incomplete text ends."""

_STRINGS = re.compile(r'"(?:[^"\\]|\\.)*"?', re.DOTALL)
_OTHER = re.compile(r"[^\[\]{}]+")


def _parse_error(error: json.JSONDecodeError) -> str:
    message = _RAPIDJSON.get(error.msg, "Invalid value.")
    if error.msg == "Expecting ',' delimiter" and _in_array(
        error.doc[: error.pos][-_LOOK_BACK_CHARS:]
    ):
        message = "Missing a comma or ] after an array element."
    if not error.doc.strip():
        message = "The document is empty."
    return f"{message} at offset: {len(error.doc[: error.pos].encode())}"


def _in_array(before: str) -> bool:
    """Return whether the innermost open bracket at the end of a text belongs to a list."""
    opened: list[str] = []
    for bracket in _OTHER.sub("", _STRINGS.sub("", before)):
        if bracket in "[{":
            opened.append(bracket)
        elif opened:
            opened.pop()
    return bool(opened) and opened[-1] == "["


def _unparsed(reason: str) -> ServeError:
    return invalid(f"JSON Parse error: {reason}")
