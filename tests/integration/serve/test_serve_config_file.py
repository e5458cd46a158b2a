"""Models, versions and labels from TensorFlow Serving's configuration, and their change under load."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import text_format
from tensorflow_serving.apis import model_management_pb2, model_service_pb2_grpc

from stoker.core.errors import ConfigError
from stoker.registry.repository import Repository
from stoker.serve.config import ServeConfig
from stoker.serve.process.server import Server
from stoker.serve.servables.model_config import ModelConfig, VersionPolicy, read_model_config
from stoker.serve.servables.versions import ModelVersions

Exported = dict[str, Path]
AskAt = Callable[..., Any]


@pytest.fixture(scope="module")
def base(exported: Exported, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Versions 1 (plus two), 2 (plus three) and 00000004 (plus two) of one model."""
    repository = Repository(tmp_path_factory.mktemp("models"))
    for model in ("half_plus_two", "half_plus_three", "half_plus_two"):
        repository.push(exported[model], "half")
    folder = repository.base("half")
    (folder / "3").rename(folder / "00000004")
    (folder / "aliases.json").unlink()
    return folder


def entry(base: Path, name: str = "half", more: str = "") -> str:
    return f'config {{ name: "{name}" base_path: "{base}" model_platform: "tensorflow" {more} }}'


def listed(*entries: str) -> str:
    return "model_config_list {\n" + "\n".join(entries) + "\n}\n"


SPECIFIC = "model_version_policy { specific { versions: 1 versions: 2 } }"


def label(name: str, version: int) -> str:
    return f'version_labels {{ key: "{name}" value: {version} }}'


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "models.config"


@pytest.fixture
def served(file: Path) -> Iterator[Callable[[str], Server]]:
    """Serves a configuration that is looked at again every 50 ms."""
    running: list[Server] = []

    def start(text: str, **more: Any) -> Server:
        file.write_text(text)
        server = Server(
            ServeConfig(
                model_config_file=file,
                model_config_poll_s=0.05,
                rest_port=0,
                grpc_port=0,
                poll_s=0.05,
                lame_duck_s=0.0,
                drain_s=5,
                **more,
            )
        )
        server.start()
        running.append(server)
        assert server.wait_until_ready(60)
        return server

    yield start
    for server in running:
        server.stop()


def wait_for(claim: Callable[[], bool], *, timeout_s: float = 60.0) -> None:
    end_s = time.monotonic() + timeout_s
    while not claim():
        assert time.monotonic() < end_s, "it did not come true"
        time.sleep(0.01)


def plus(server: Server, ask_at: AskAt, path: str = "half") -> Any:
    """What the model adds to a half of zero; the error's text where there is none."""
    answer = ask_at(server.rest_port, f"/v1/models/{path}:predict", {"instances": [0.0]})
    found = answer.json()
    return found["predictions"][0] if answer.status == 200 else found["error"]


def loaded(server: Server, ask_at: AskAt, name: str = "half") -> list[int]:
    found = ask_at(server.rest_port, f"/v1/models/{name}").json()
    return [
        int(status["version"])
        for status in found.get("model_version_status", [])
        if status["state"] == "AVAILABLE"
    ]


def test_the_file_is_read_with_its_policies_and_labels(file: Path) -> None:
    file.write_text(
        listed(
            entry(Path("/a"), "one"),
            entry(Path("/b"), "two", "model_version_policy { latest { num_versions: 3 } }"),
            entry(Path("/c"), "three", "model_version_policy { all {} }"),
            entry(Path("/d"), "four", SPECIFIC + label("stable", 1)),
        )
    )

    one, two, three, four = read_model_config(file)

    assert one == ModelConfig(name="one", base=Path("/a"))
    assert two.policy == VersionPolicy(count=3)
    assert three.policy == VersionPolicy(kind="all")
    assert four.policy == VersionPolicy(kind="specific", versions=(1, 2))
    assert four.labels == {"stable": 1}


@pytest.mark.parametrize(
    "text",
    [
        "model_config_list {",
        "models {}",
        listed(entry(Path("/a"), "a"), entry(Path("/b"), "a")),
        listed(entry(Path("/a"), "")),
        listed(entry(Path("a"), "a")),
        listed(entry(Path("/a"), "../a")),
        listed(entry(Path("/a"), "a", label("../x", 1))),
        listed(entry(Path("/a"), "a", label("x", -1))),
        listed(entry(Path("/a"), "a", "model_version_policy { specific {} }")),
        listed(entry(Path("/a"), "a", "model_version_policy { specific { versions: -3 } }")),
        'model_config_list { config { name: "a" base_path: "/a" model_platform: "caffe" } }',
        "custom_model_config {}",
        "",
    ],
)
def test_a_wrong_file_is_refused_before_anything_is_served(file: Path, text: str) -> None:
    file.write_text(text)

    with pytest.raises(ConfigError):
        Server(ServeConfig(model_config_file=file, rest_port=0, grpc_port=0))


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (VersionPolicy(), {4}),
        (VersionPolicy(count=2), {4, 2}),
        (VersionPolicy(kind="all"), {4, 2, 1}),
        (VersionPolicy(kind="specific", versions=(2, 1, 9)), {2, 1}),
    ],
)
def test_a_policy_says_which_versions_are_loaded(
    base: Path, policy: VersionPolicy, expected: set[int]
) -> None:
    versions = ModelVersions(ModelConfig(name="half", base=base, policy=policy))
    try:
        versions.poll()
        assert set(versions._available) == expected
        versions.poll()
        assert set(versions._available) == expected
    finally:
        versions.close()


def test_several_versions_answer_by_number_and_by_label(
    base: Path, ask_at: AskAt, served: Callable[[str], Server]
) -> None:
    server = served(listed(entry(base, more=SPECIFIC + label("stable", 1) + label("canary", 2))))

    assert loaded(server, ask_at) == [2, 1]
    found = [plus(server, ask_at, f"half{place}") for place in ("", "/versions/1", "/versions/2")]
    assert found == [3.0, 2.0, 3.0]
    assert plus(server, ask_at, "half/labels/stable") == 2.0
    assert plus(server, ask_at, "half/labels/canary") == 3.0
    assert plus(server, ask_at, "half/labels/none") == "Unrecognized servable version label: none"


def test_a_label_may_name_a_version_that_comes_later(
    exported: Exported, tmp_path: Path, ask_at: AskAt, served: Callable[[str], Server]
) -> None:
    folder = tmp_path / "half"
    shutil.copytree(exported["half_plus_two"], folder / "1")
    server = served(
        listed(entry(folder, more="model_version_policy { all {} }" + label("next", 2)))
    )
    early = plus(server, ask_at, "half/labels/next")
    assert early == "Servable not found for request: Specific(half, 2)"

    shutil.copytree(exported["half_plus_three"], folder / "2")

    wait_for(lambda: plus(server, ask_at, "half/labels/next") == 3.0)


def test_a_changed_file_is_taken_up_and_a_wrong_one_changes_nothing(
    base: Path, file: Path, ask_at: AskAt, served: Callable[[str], Server]
) -> None:
    server = served(listed(entry(base)))
    assert plus(server, ask_at) == 2.0

    file.write_text(listed(entry(base, more=SPECIFIC), entry(base, "other")))
    wait_for(lambda: loaded(server, ask_at) == [2, 1] and loaded(server, ask_at, "other") == [4])
    file.write_text("model_config_list { broken")
    time.sleep(0.2)  # some looks at the broken file
    assert (plus(server, ask_at), plus(server, ask_at, "other")) == (3.0, 2.0)

    file.write_text(listed(entry(base, "other")))
    wait_for(lambda: "not found" in str(plus(server, ask_at)))
    assert plus(server, ask_at, "other") == 2.0
    assert ask_at(server.rest_port, "/readyz").status == 200


def test_labels_and_versions_move_under_load_without_a_lost_or_mixed_answer(
    base: Path, file: Path, ask_at: AskAt, served: Callable[[str], Server]
) -> None:
    """The label goes to and fro while only its version is loaded; every answer is of the one or other."""

    def only(version: int) -> str:
        policy = f"model_version_policy {{ specific {{ versions: {version} }} }}"
        return listed(entry(base, more=policy + label("live", version)))

    server = served(only(1))
    ended = threading.Event()
    answers: list[Any] = []

    def load() -> None:
        while not ended.is_set():
            answers.append(plus(server, ask_at, "half/labels/live"))

    clients = [threading.Thread(target=load) for _ in range(3)]
    for client in clients:
        client.start()
    for version in (2, 1, 2):
        file.write_text(only(version))
        wait_for(lambda version=version: loaded(server, ask_at) == [version])  # type: ignore[misc] # bound now
    ended.set()
    for client in clients:
        client.join()

    assert set(answers) == {2.0, 3.0}
    assert plus(server, ask_at, "half/labels/live") == 3.0


def reload(server: Server, text: str) -> None:
    request = model_management_pb2.ReloadConfigRequest()
    text_format.Parse(text, request.config)
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        model_service_pb2_grpc.ModelServiceStub(channel).HandleReloadConfigRequest(
            request, timeout=60
        )


def refusal(server: Server, text: str) -> tuple[str, str]:
    with pytest.raises(grpc.RpcError) as caught:
        reload(server, text)
    return caught.value.code().name, caught.value.details()


def test_a_reload_request_answers_when_the_models_can_be_called(
    base: Path, ask_at: AskAt, served: Callable[..., Server], tmp_path: Path
) -> None:
    server = served(listed(entry(base)))
    server._config_watch.stop()  # type: ignore[union-attr] # the request alone is to act

    reload(server, listed(entry(base, more=SPECIFIC + label("live", 1)), entry(base, "new")))
    assert loaded(server, ask_at) == [2, 1]
    assert (plus(server, ask_at, "new"), plus(server, ask_at, "half/labels/live")) == (2.0, 2.0)

    reload(server, listed(entry(base, more=SPECIFIC + label("live", 2))))
    assert plus(server, ask_at, "half/labels/live") == 3.0

    code, said = refusal(server, listed(entry(base, more=SPECIFIC + label("live", 9))))
    assert (code, said) == (
        "FAILED_PRECONDITION",
        (
            "Request to assign label live to version 9 of model half, which is not currently "
            "available for inference"
        ),
    )
    assert plus(server, ask_at, "half/labels/live") == 3.0
    (tmp_path / "empty").mkdir()
    code, said = refusal(server, listed(entry(base), entry(tmp_path / "empty", "empty")))
    assert code == "FAILED_PRECONDITION"
    assert "empty" in said
    assert refusal(server, "")[0] == "INVALID_ARGUMENT"
    assert refusal(server, listed(entry(Path("rel"))))[0] == "INVALID_ARGUMENT"
    assert plus(server, ask_at) == 2.0


def test_a_repository_is_not_reconfigured_by_a_request(server: Server, base: Path) -> None:
    code, said = refusal(server, listed(entry(base)))

    assert code == "FAILED_PRECONDITION"
    assert "--model_config_file" in said


@pytest.mark.parametrize("allowed", [False, True])
def test_a_label_for_a_version_that_is_not_there_is_taken_at_the_start_and_by_a_reload_if_allowed(
    base: Path, ask_at: AskAt, served: Callable[..., Server], allowed: bool
) -> None:
    """At the start no client loses a label by it, and the version may appear later: the flag is for reloads."""
    latest = label("early", 9)
    server = served(listed(entry(base, more=latest)), allow_unavailable_labels=allowed)
    missing = "Servable not found for request: Specific(half, 9)"
    assert (plus(server, ask_at), plus(server, ask_at, "half/labels/early")) == (2.0, missing)
    server._config_watch.stop()  # type: ignore[union-attr] # the request alone is to act

    given = listed(entry(base, more=latest + label("late", 8)))
    if allowed:
        reload(server, given)
        expected = "Servable not found for request: Specific(half, 8)"
    else:
        code, said = refusal(server, given)
        assert code == "FAILED_PRECONDITION"
        assert "assign label late to version 8 of model half" in said
        expected = "Unrecognized servable version label: late"

    assert plus(server, ask_at, "half/labels/late") == expected
    assert (plus(server, ask_at), plus(server, ask_at, "half/labels/early")) == (2.0, missing)
    moved = refusal(server, listed(entry(base, more=label("early", 7) + label("late", 8))))
    assert moved[0] == "FAILED_PRECONDITION", (
        "a label that is known never goes to what is not there"
    )
