"""TF_CONFIG is read strictly, written as TensorFlow reads it, and its ports are not given away."""

from __future__ import annotations

import json
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.cluster.resolver import (
    ClusterSpec,
    held_ports,
    local_cluster,
    parse_tf_config,
    read_tf_config,
    require_own_port,
)
from stoker.core.errors import BusyError, ConfigError

ports = st.lists(st.integers(1024, 65535), unique=True, min_size=8, max_size=8)


@given(ports, st.integers(1, 4), st.integers(0, 3))
def test_what_is_written_is_what_is_read(ports: list[int], workers: int, servers: int) -> None:
    for spec in local_cluster(ports, workers=workers, servers=servers):
        assert parse_tf_config(spec.to_tf_config()) == spec


@given(ports, st.integers(1, 4), st.integers(1, 3))
def test_every_task_is_there_once_and_trainers_have_ranks_from_the_chief_on(
    ports: list[int], workers: int, servers: int
) -> None:
    cluster = local_cluster(ports, workers=workers, servers=servers)

    assert len({spec.address for spec in cluster}) == workers + servers + 1
    trainers = [spec for spec in cluster if spec.job in ("chief", "worker")]
    assert [spec.rank for spec in trainers] == list(range(workers + 1))
    assert [spec.trainers for spec in cluster] == [workers + 1] * len(cluster)
    assert [spec.name for spec in trainers][:2] == ["chief", "worker 0"]
    assert all(spec.serves == (spec.job != "chief") for spec in cluster)
    assert all(spec.address.startswith("127.0.0.1:") for spec in cluster)


def test_tensorflow_reads_the_same_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    import tensorflow as tf

    (_, second) = local_cluster([5001, 5002], workers=2)
    monkeypatch.setenv("TF_CONFIG", second.to_tf_config())

    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()

    assert resolver.cluster_spec().as_dict() == {"worker": ["127.0.0.1:5001", "127.0.0.1:5002"]}
    assert (resolver.task_type, resolver.task_id) == ("worker", 1)


def test_without_the_variable_there_is_no_cluster() -> None:
    assert read_tf_config({}) is None
    assert read_tf_config({"TF_CONFIG": " "}) is None


def test_an_index_may_be_text_and_other_keys_are_let_be() -> None:
    text = (
        '{"cluster": {"worker": ["a:1", "b:2"]}, "task": {"type": "worker", "index": "1"}, "x": 1}'
    )

    assert parse_tf_config(text) == ClusterSpec(workers=("a:1", "b:2"), index=1)


def test_an_evaluator_need_not_be_listed() -> None:
    text = '{"cluster": {"worker": ["a:1"]}, "task": {"type": "evaluator", "index": 0}}'

    assert parse_tf_config(text).job == "evaluator"


WORKERS = {"worker": ["a:1", "b:2"]}
FIRST = {"type": "worker", "index": 0}

MALFORMED = {
    "no JSON": ("{'cluster'", "TF_CONFIG must be JSON"),
    "a number": ("3", "must hold a mapping `cluster`"),
    "no cluster": (json.dumps({"task": FIRST}), "must hold a mapping `cluster`"),
    "an empty cluster": (json.dumps({"cluster": {}, "task": FIRST}), "a mapping `cluster`"),
    "no task": (json.dumps({"cluster": WORKERS}), "must hold a mapping `task`"),
    "an unknown job": (
        json.dumps({"cluster": {"wroker": ["a:1"]}, "task": FIRST}),
        "a job must be one of chief, worker, ps, evaluator. Received: 'wroker'",
    ),
    "one address": (json.dumps({"cluster": {"worker": "a:1"}, "task": FIRST}), "must be a list"),
    "no port": (json.dumps({"cluster": {"worker": ["a"]}, "task": FIRST}), "must hold host:port"),
    "a high port": (
        json.dumps({"cluster": {"worker": ["a:70000"]}, "task": FIRST}),
        "must hold host:port. Received: 'a:70000'",
    ),
    "twice": (
        json.dumps({"cluster": {"worker": ["a:1", "a:1"]}, "task": FIRST}),
        "must not name an address twice",
    ),
    "two chiefs": (
        json.dumps({"cluster": {"chief": ["a:1", "b:1"]}, "task": {"type": "chief", "index": 0}}),
        "must name at most one chief",
    ),
    "an index too high": (
        json.dumps({"cluster": WORKERS, "task": {"type": "worker", "index": 2}}),
        "one of the cluster's 2 worker tasks. Received: 2",
    ),
    "an index below 0": (
        json.dumps({"cluster": WORKERS, "task": {"type": "worker", "index": -1}}),
        "one of the cluster's 2 worker tasks",
    ),
    "no index": (json.dumps({"cluster": WORKERS, "task": {"type": "worker"}}), "a whole number"),
    "a job that is not there": (
        json.dumps({"cluster": WORKERS, "task": {"type": "ps", "index": 0}}),
        "one of the cluster's 0 ps tasks",
    ),
    "an unknown type": (
        json.dumps({"cluster": WORKERS, "task": {"type": "boss", "index": 0}}),
        "task.type must be one of",
    ),
}


@pytest.mark.parametrize("fault", MALFORMED)
def test_what_is_malformed_is_one_line_that_says_what(fault: str) -> None:
    text, rule = MALFORMED[fault]

    with pytest.raises(ConfigError) as caught:
        parse_tf_config(text)

    assert rule in caught.value.line()
    assert "\n" not in caught.value.line()


@given(st.text(max_size=40) | st.recursive(st.none() | st.integers(), st.lists).map(json.dumps))
def test_nothing_but_a_clear_error_comes_of_any_text(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_tf_config(text)


def test_a_held_port_is_given_to_no_other_process_and_taken_by_its_server() -> None:
    with held_ports(2) as (first, second):
        assert first != second
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind(("127.0.0.1", first))
        with socket.socket() as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(("0.0.0.0", first))
            server.listen()
            with socket.create_connection(("127.0.0.1", first), timeout=5):
                pass


def test_a_port_on_which_something_listens_is_refused_with_its_number() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        spec = ClusterSpec(workers=("127.0.0.1:1", f"127.0.0.1:{port}"), index=1)

        with pytest.raises(BusyError, match=f"port {port} of worker 1 in TF_CONFIG must be free"):
            require_own_port(spec)
    require_own_port(spec)
