"""What passes between a server and the process that runs a version in shadow."""

from __future__ import annotations

import socket
import struct
import threading

import numpy as np
import pytest

from stoker.rollout.shadow.channel import (
    CopiedRequest,
    ShadowTarget,
    receive_answer,
    receive_request,
    send_answer,
    send_request,
    target_of,
)


def test_arrays_of_each_kind_arrive_as_they_were_sent() -> None:
    inputs = {
        "large": np.arange(1_000_000, dtype=np.float32).reshape(1_000, -1),
        "texts": np.array([b"a", b"\x00\xff"], object),
        "empty": np.zeros((0, 3), np.int64),
        "every other": np.arange(10)[::2],
        "scalar": np.array(7.5),
    }
    ours, its = socket.socketpair()
    with ours, its:
        for outputs in (None, {"y": np.array([True])}):
            sent = CopiedRequest(signature="s", inputs=inputs, outputs=outputs)
            sender = threading.Thread(target=send_request, args=(ours, sent))
            sender.start()
            found = receive_request(its)
            sender.join()
            assert found is not None
            assert (found.signature, found.inputs.keys()) == ("s", inputs.keys())
            for name, value in inputs.items():
                np.testing.assert_array_equal(found.inputs[name], value)
                assert found.inputs[name].dtype == value.dtype
            assert (found.outputs is None) == (outputs is None)


def test_an_end_that_is_closed_is_not_a_message() -> None:
    ours, its = socket.socketpair()
    with ours:
        its.close()
        assert receive_request(ours) is None
        assert receive_answer(ours) is None
    ours, its = socket.socketpair()
    with ours:
        its.sendall(struct.pack("!I", 3))
        its.close()
        assert receive_request(ours) is None


def test_an_answer_is_a_json_object_of_bounded_size() -> None:
    ours, its = socket.socketpair()
    with ours, its:
        send_answer(its, {"failed": ""})
        assert receive_answer(ours) == {"failed": ""}
        its.sendall(struct.pack("!Q", 2) + b"[]")
        with pytest.raises(ValueError, match="not an object"):
            receive_answer(ours)
        its.sendall(struct.pack("!Q", 1 << 40))
        with pytest.raises(ValueError, match="1099511627776 bytes"):
            receive_answer(ours)
        ours.settimeout(0.01)
        with pytest.raises(TimeoutError):
            receive_answer(ours)


def test_a_target_passes_through_the_command_line() -> None:
    target = ShadowTarget(
        model="m", baseline="/m/1", candidate="/m/2", tolerance=0.5, allow_ops=("PyFunc",)
    )

    assert target_of(target.to_json()) == target
