"""The parts of gRPC's transport that need no connection: heads, messages, frames."""

from __future__ import annotations

import gzip
import random
import zlib
from urllib.parse import unquote

import pytest
from hpack import Decoder, Encoder

from stoker.serve.errors import Code, ServeError
from stoker.serve.grpc_server import frames, headers
from stoker.serve.grpc_server.frames import ConnectionFault
from stoker.serve.grpc_server.headers import HeaderDecoder
from stoker.serve.grpc_server.messages import CompressedMessage, MessageReader

CALL = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/package.Service/Method"),
    (":authority", "localhost"),
    ("te", "trailers"),
    ("content-type", "application/grpc"),
]


def block(fields: list[tuple[str, str]], encoder: Encoder | None = None) -> bytes:
    return bytes((encoder or Encoder()).encode(fields))


def test_a_head_that_comes_again_means_the_same_whatever_came_between() -> None:
    chance = random.Random(0)
    encoder, blocks = Encoder(), HeaderDecoder(4096)
    encoder.header_table_size = 300  # few entries: old ones are lost all the time
    again = 0
    seen: set[bytes] = set()
    for _ in range(3000):
        more = [
            (f"x-{chance.randrange(6)}", str(chance.randrange(4)))
            for _ in range(chance.randrange(3))
        ]
        timeout = [("grpc-timeout", f"{chance.randrange(3)}S")] if chance.random() < 0.5 else []
        wire = block([*CALL, *timeout, *more], encoder)
        again += wire in seen
        seen.add(wire)

        head = blocks.decode(wire)

        assert head.metadata == tuple(more)
        assert head.timeout_s == (float(timeout[0][1][:-1]) if timeout else None)
    assert again > 100  # or the memory was not tried


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({":method": "GET"}, {"http_status": 405}),
        ({"content-type": "text/html"}, {"http_status": 415}),
        ({"content-type": "application/grpcx"}, {"http_status": 415}),
        ({"content-type": "application/grpc+proto"}, {"path": "/package.Service/Method"}),
        ({"grpc-timeout": "250m"}, {"timeout_s": 0.25}),
        ({"grpc-timeout": "99999999H"}, {"timeout_s": 99999999 * 3600.0}),
        ({"x-raw-bin": "AAH/"}, {"metadata": (("x-raw-bin", b"\x00\x01\xff"),)}),
        ({"x-raw-bin": "AAE"}, {"metadata": (("x-raw-bin", b"\x00\x01"),)}),
        ({"connection": "close"}, {"malformed": True}),
        ({"X-Upper": "1"}, {"malformed": True}),
        ({":status": "200"}, {"malformed": True}),
    ],
)
def test_what_a_head_says(change: dict[str, str], said: dict[str, object]) -> None:
    fields = {**dict(CALL), **change}
    ordered = sorted(fields.items(), key=lambda field: not field[0].startswith(":"))

    head = HeaderDecoder(4096).decode(block(ordered))

    assert {name: getattr(head, name) for name in said} == said


@pytest.mark.parametrize(
    "change", [{"grpc-timeout": "1"}, {"grpc-timeout": "123456789S"}, {"x-bin": "%"}]
)
def test_a_wrong_head_is_the_callers_fault(change: dict[str, str]) -> None:
    head = HeaderDecoder(4096).decode(block([*CALL, *change.items()]))

    assert head.refusal is not None
    assert head.refusal[0] is Code.INVALID_ARGUMENT


@pytest.mark.parametrize("missing", [":method", ":scheme", ":path"])
def test_a_head_without_its_first_parts_is_malformed(missing: str) -> None:
    rest = [field for field in CALL if field[0] != missing]

    assert HeaderDecoder(4096).decode(block(rest)).malformed


def test_large_headers_refuse_the_call_and_far_too_large_ones_the_connection() -> None:
    blocks = HeaderDecoder(4096)

    head = blocks.decode(block([*CALL, ("x-long", "y" * 5000)]))

    assert head.refusal is not None
    assert head.refusal[0] is Code.RESOURCE_EXHAUSTED
    # A kilobyte that is remembered and then named again and again: a bomb.
    encoder, named = Encoder(), ("x-bomb", "z" * 1000)
    blocks.decode(block([*CALL, named], encoder))
    bomb = block([*CALL, *[named] * 100], encoder)
    assert len(bomb) < 200
    with pytest.raises(ConnectionFault) as caught:
        blocks.decode(bomb)
    assert caught.value.error is frames.Error.ENHANCE_YOUR_CALM


@pytest.mark.parametrize("size", [0, 1, 126, 127, 128, 254, 255, 16_383, 16_511, 70_000])
def test_what_is_written_is_read_by_others(size: int) -> None:
    fields = [("grpc-status", "3"), ("x", "a" * size)]

    decoded = Decoder(max_header_list_size=1 << 20).decode(headers.encode(fields))

    assert [(str(name), str(value)) for name, value in decoded] == fields


@pytest.mark.parametrize(
    ("said", "wire"),
    [("a b", "a b"), ("50 %\n", "50 %25%0A"), ("Größe", "Gr%C3%B6%C3%9Fe"), ("\ud800", "?")],
)
def test_a_reason_goes_as_its_protocol_has_it(said: str, wire: str) -> None:
    decoded = Decoder().decode(headers.trailers(3, said))
    found = {str(name): str(value) for name, value in decoded}

    assert found == {"grpc-status": "3", "grpc-message": wire}


def prefixed(message: bytes, *, packed: bool = False) -> bytes:
    return bytes((packed,)) + len(message).to_bytes(4, "big") + message


def test_messages_are_found_wherever_the_bytes_are_cut() -> None:
    chance = random.Random(1)
    for _ in range(300):
        wanted = [chance.randbytes(chance.choice((0, 1, 5, 100))) for _ in range(5)]
        stream = b"".join(map(prefixed, wanted))
        messages, found = cut("identity", 10), []
        while stream:
            size = chance.randrange(1, 40)
            found += messages.feed(stream[:size])
            stream = stream[size:]
        assert found == wanted
        assert not messages.is_partial


def cut(encoding: str, most: int) -> MessageReader:
    return MessageReader(encoding=encoding, max_bytes=10 * most, max_decompressed=most)


def test_a_packed_message_is_unpacked_and_never_beyond_the_limit() -> None:
    plain = b"a" * 1000
    for encoding, pack in (("gzip", gzip.compress), ("deflate", zlib.compress)):
        (found,) = cut(encoding, 1000).feed(prefixed(pack(plain), packed=True))
        assert isinstance(found, CompressedMessage)
        assert found.decompress() == plain
        for wrong, code in (
            (pack(plain + b"a"), Code.RESOURCE_EXHAUSTED),
            (pack(plain)[:-5], Code.INVALID_ARGUMENT),
            (b"no such thing", Code.INVALID_ARGUMENT),
        ):
            (found,) = cut(encoding, 1000).feed(prefixed(wrong, packed=True))
            assert isinstance(found, CompressedMessage)
            with pytest.raises(ServeError) as caught:
                found.decompress()
            assert caught.value.code is code


def test_a_message_that_is_too_large_is_refused_by_its_length() -> None:
    with pytest.raises(ServeError) as caught:
        cut("identity", 1).feed(prefixed(b"a" * 11)[:5])

    assert caught.value.code is Code.RESOURCE_EXHAUSTED


def test_an_unknown_compression_is_refused_when_it_is_used() -> None:
    messages = cut("snappy", 10)

    assert messages.feed(prefixed(b"plain")) == [b"plain"]
    (found,) = messages.feed(prefixed(b"x", packed=True))
    assert isinstance(found, CompressedMessage)
    with pytest.raises(ServeError) as caught:
        found.decompress()
    assert caught.value.code is Code.UNIMPLEMENTED


@pytest.mark.parametrize("letter", ["x", "%", "é", "😀"])
def test_a_long_reason_is_cut_to_what_every_client_takes(letter: str) -> None:
    for size in range(1360, 1370):
        decoded = Decoder(max_header_list_size=1 << 20).decode(
            headers.trailers(5, letter * 3 * size)
        )
        said = {str(name): str(value) for name, value in decoded}["grpc-message"]
        assert 4000 < len(said) <= 4096
        again = unquote(said, errors="ignore")
        assert again == letter * len(again)


def test_what_little_hpack_unfolds_to_is_not_remembered() -> None:
    encoder, blocks = Encoder(), HeaderDecoder(32 << 10)
    large = ("x-large", "z" * 2000)
    blocks.decode(block([*CALL, large], encoder))
    for number in range(50):
        blocks.decode(block([*CALL, *[large] * (number % 10 + 1)], encoder))

    assert sum(map(len, blocks._cache)) < 1024
