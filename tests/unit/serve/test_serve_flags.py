"""Each flag of `stoker serve` reaches its field, in TensorFlow Serving's spelling and in its own."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stoker.cli.main import invoke
from stoker.cluster.limits import usable_cores
from stoker.serve.batching.config import BatchingConfig
from stoker.serve.config import ServeConfig
from stoker.serve.process import workers

Read = Callable[..., ServeConfig]

FILES = {
    "BATCHING": "max_batch_size { value: 8 } batch_timeout_micros { value: 250 } "
    "max_enqueued_batches { value: 3 } num_batch_threads { value: 2 } "
    "allowed_batch_sizes: 2 allowed_batch_sizes: 8 pad_variable_length_inputs: true",
    "MODELS": 'model_config_list { config { name: "m" base_path: "/srv/m" } }',
    "PATH": 'prometheus_config { enable: true path: "/metrics" }',
    "SILENT": "prometheus_config { enable: false }",
    "KEYS": "",
    "SESSION": "intra_op_parallelism_threads: 1",
}
"""The name of a file in a flag -> its content."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Those files, one for TLS, and a model's folder."""
    found = tmp_path_factory.mktemp("flags")
    for name, text in {**FILES, "TLS": ssl_config(found)}.items():
        (found / name).write_text(text)
    (found / "BASE" / "1").mkdir(parents=True)
    return found


def ssl_config(folder: Path) -> str:
    openssl = shutil.which("openssl")
    assert openssl is not None, "the tests of TLS need the openssl program"
    made = ["-x509", "-days", "2", "-keyout", "key.pem", "-out", "cert.pem", "-subj", "/CN=x"]
    command = [openssl, "req", "-newkey", "rsa:2048", "-nodes", *made]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    parts = {"server_key": "key.pem", "server_cert": "cert.pem", "custom_ca": "cert.pem"}
    texts = [f"{key}: {json.dumps((folder / file).read_text())}" for key, file in parts.items()]
    return "\n".join([*texts, "client_verify: true"])


@pytest.fixture
def read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Read:
    """What `stoker serve FLAGS` would have its workers serve; none is started."""
    found: list[ServeConfig] = []
    monkeypatch.setattr(workers, "run_workers", lambda config, *_, **__: found.append(config))

    def by(*flags: str, served: str = "BASE") -> ServeConfig:
        names = rf"\b({'|'.join(path.name for path in folder.iterdir())})$"
        given = [
            re.sub(names, lambda name: str(folder / name[1]), flag) for flag in (served, *flags)
        ]
        assert invoke(["serve", *filter(None, given)], debug=True) == 0
        return found.pop()

    return by


def test_without_flags_the_defaults_are_the_configurations_own(read: Read, folder: Path) -> None:
    """The flags and the configuration have the same defaults."""
    assert read() == ServeConfig(models={"BASE": folder / "BASE"})


@pytest.mark.parametrize(
    ("flag", "own", "field", "value"),
    [
        ("--file_system_poll_wait_seconds=7", "--poll-s=7", "poll_s", 7.0),
        (
            "--enable_per_model_batching_parameters=true",
            "--per-model-batching",
            "per_model_batching",
            True,
        ),
        (
            "--allow_version_labels_for_unavailable_models=true",
            "--allow-unavailable-labels",
            "allow_unavailable_labels",
            True,
        ),
        (
            "--enable_signature_method_name_check=true",
            "--check-method-names",
            "check_method_names",
            True,
        ),
        ("--rest_api_num_threads=3", "--rest-api-num-threads=3", "rest_workers", 3),
        ("--rest_api_timeout_in_ms=250", "--rest-api-timeout-in-ms=250", "rest_timeout_s", 0.25),
        ("--rest_api_port=1", "--rest-api-port=1", "rest_port", 1),
        ("--port=2", "--port=2", "grpc_port", 2),
        ("--grpc_socket_path=/run/s", "--grpc-socket-path=/run/s", "grpc_socket_path", "/run/s"),
        (
            "--per_process_gpu_memory_fraction=0.25",
            "--per-process-gpu-memory-fraction=0.25",
            "per_process_gpu_memory_fraction",
            0.25,
        ),
        ("--enable_model_warmup=false", "--no-model-warm-up", "warm_up", False),
        ("--enable_model_warmup=true", "--enable_model_warmup", "warm_up", True),
        (
            "--grpc_channel_arguments=grpc.max_concurrent_streams=5,grpc.x=a=b",
            "--grpc-channel-arguments=grpc.max_concurrent_streams=5,grpc.x=a=b",
            "grpc_channel_arguments",
            {"grpc.max_concurrent_streams": 5, "grpc.x": "a=b"},
        ),
        (
            "--monitoring_config_file=PATH",
            "--monitoring-config-file=PATH",
            "metrics_path",
            "/metrics",
        ),
        (
            "--monitoring_config_file=SILENT",
            "--monitoring-config-file=SILENT",
            "metrics_path",
            None,
        ),
        (
            "--batching_parameters_file=BATCHING",
            "--batching-parameters-file=BATCHING",
            "batching",
            BatchingConfig(
                max_batch_size=8,
                batch_timeout_micros=250,
                max_enqueued_batches=3,
                num_batch_threads=2,
                allowed_batch_sizes=(2, 8),
                pad_variable_length_inputs=True,
                larger="refuse",
            ),
        ),
        ("--grpc_max_threads=3", "--grpc-num-threads=3", "grpc_workers", 3),
        (
            "--tensorflow_intra_op_parallelism=3",
            "--tensorflow-intra-op-parallelism=3",
            "intra_op_threads",
            3,
        ),
        (
            "--tensorflow_inter_op_parallelism=3",
            "--tensorflow-inter-op-parallelism=3",
            "inter_op_threads",
            3,
        ),
        (
            "--enable_serialization_as_tensor_content=true",
            "--enable_serialization_as_tensor_content",
            "tensor_content",
            True,
        ),
        ("--enable_batching=true", "--batching", "batching", BatchingConfig(enabled=True)),
        ("--enable_profiler=false", "--no-profiler", "profiler", False),
        ("--rest_api_enable_cors_support=true", "--rest_api_enable_cors_support", "cors", True),
        (
            "--num_request_iterations_for_warmup=2",
            "--num_request_iterations_for_warmup=2",
            "warm_up_times",
            2,
        ),
        (
            "--saved_model_tags=serve,gpu",
            "--saved_model_tags=serve,gpu,",
            "saved_model_tags",
            ("serve", "gpu"),
        ),
        (
            "--mixed_precision=bfloat16",
            "--mixed_precision=bfloat16",
            "mixed_precision",
            "bfloat16",
        ),
        ("--no-batching", "--no-batching", "batching", BatchingConfig(enabled=False)),
    ],
)
def test_a_flag_of_tensorflow_serving_sets_its_field_and_no_other(
    read: Read, flag: str, own: str, field: str, value: Any
) -> None:
    config = read(flag)

    assert getattr(config, field) == value
    assert read(own) == config
    assert config == dataclasses.replace(read(), **{field: value})


@pytest.mark.parametrize(
    ("flags", "field", "value"),
    [
        (["--allow-ops", "PrintV2", "--allow-ops=PyFunc"], "allow_ops", ("PrintV2", "PyFunc")),
        (["--grpc-num-threads=3"], "grpc_workers", 3),
        (["--max-in-flight=4"], "max_in_flight", 4),
        (["--max-body-mb=5"], "max_body_bytes", 5 << 20),
        (["--max-memory-mb=6"], "max_memory_bytes", 6 << 20),
        (["--request-log-mb=7"], "request_log_bytes", 7 << 20),
        (["--max-series=70"], "max_series", 70),
        (["--skew-window-s=0"], "skew_window_s", 0.0),
        (["--max-run-s=8"], "max_run_s", 8.0),
        (["--workers=2"], "workers", 2),
        (["--access-log=-"], "access_log", "-"),
        (["--host=::1"], "host", "::1"),
        (["--allow-unauthenticated"], "allow_unauthenticated", True),
        (["--unload-first"], "unload_first", True),
        (["--warm-up-sizes=on"], "warm_sizes", "on"),
        (["--warm-up-s=9"], "warm_s", 9.0),
    ],
)
def test_a_flag_of_our_own_sets_its_field_and_no_other(
    read: Read, flags: list[str], field: str, value: Any
) -> None:
    assert read(*flags) == dataclasses.replace(read(), **{field: value})


@pytest.mark.parametrize(
    ("flag", "field", "name"),
    [
        ("--ssl_config_file=TLS", "ssl_config_file", "TLS"),
        ("--ssl-config-file=TLS", "ssl_config_file", "TLS"),
        ("--keys-file=KEYS", "keys_file", "KEYS"),
        ("--ready_file=ready", "ready_file", "ready"),
        ("--tensorflow_session_config_file=SESSION", "session_config_file", "SESSION"),
        ("--ready-file=ready", "ready_file", "ready"),
    ],
)
def test_a_flag_that_names_a_file_sets_its_field_and_no_other(
    read: Read, folder: Path, flag: str, field: str, name: str
) -> None:
    path: Any = folder / name if (folder / name).exists() else Path(name)

    assert read(flag) == dataclasses.replace(read(), **{field: path})


def test_a_model_of_litert_is_preferred_on_each_core_or_on_as_many_as_the_flag_says(
    read: Read,
) -> None:
    preferred = read("--prefer_tflite_model=true")

    assert preferred.litert_interpreters == usable_cores()
    assert read("--prefer_tflite_model", "--num_tflite_pools=3").litert_interpreters == 3
    assert read("--num_tflite_pools=3") == read()


def test_the_versions_are_printed_and_nothing_is_served(
    read: Read, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(["serve", "--version"], debug=True) == 0
    assert re.match(r"Stoker: \S+\nTensorFlow Library: \S+\n", capsys.readouterr().out)
    assert read("--version=false") == read()


def test_one_flag_sets_both_numbers_of_threads(read: Read) -> None:
    config = read("--tensorflow_session_parallelism=3")

    assert config == dataclasses.replace(read(), intra_op_threads=3, inter_op_threads=3)


def test_clients_that_show_certificates_are_authenticated(read: Read, folder: Path) -> None:
    """The file is read when the flags are: an address that others reach is taken with it."""
    config = read("--ssl_config_file=TLS", "--host=0.0.0.0")

    assert (config.host, config.ssl_config_file) == ("0.0.0.0", folder / "TLS")


def test_a_file_of_models_is_looked_at_again_as_often_as_the_flag_says(
    read: Read, folder: Path
) -> None:
    given = "--model_config_file=MODELS"

    once = read(given, served="")
    again = read(given, "--model_config_file_poll_wait_seconds=2.5", served="")

    assert once == ServeConfig(model_config_file=folder / "MODELS")
    assert again == dataclasses.replace(once, model_config_poll_s=2.5)
    assert read("--model-config-file=MODELS", "--model-config-poll-s=2.5", served="") == again


@pytest.mark.parametrize("flag", ["--model_config_file", "--model-config-file"])
def test_the_file_of_models_overrides_the_flags_of_one_model_as_in_tensorflow_serving(
    read: Read, folder: Path, capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    one = ("--model_name=taxi", "--model_base_path", "/nowhere")

    config = read(*one, f"{flag}=MODELS", served="")

    assert config == ServeConfig(model_config_file=folder / "MODELS")
    said = "stoker: --model_name, --model_base_path are passed over: --model_config_file names the"
    assert capsys.readouterr().err.splitlines() == [f"{said} models"]


def test_one_model_is_named_by_tensorflow_servings_two_flags(read: Read, folder: Path) -> None:
    config = read("--model_name=taxi", "--model_base_path=BASE", served="")

    assert config == ServeConfig(models={"taxi": folder / "BASE"})


@pytest.mark.parametrize(
    "flag",
    [
        "--max_num_load_retries=5",
        "--load_retry_interval_micros=1",
        "--num_load_threads=4",
        "--num_unload_threads=4",
        "--flush_filesystem_caches=false",
        "--remove_unused_fields_from_bundle_metagraph",
        "--platform_config_file=x",
        "--num_tflite_interpreters_per_pool=2",
        "--xla_cpu_compilation_enabled",
        "--xla_gpu_compilation_enabled=true",
        "--thread_pool_factory_config_file=x",
        "--skip_initialize_tpu",
        "--use_alts_credentials",
        "--enable_grpc_healthcheck_service",
    ],
)
def test_a_flag_without_a_meaning_here_is_reported_and_changes_nothing(
    read: Read, capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    assert read(flag) == read()
    assert f"{flag.partition('=')[0]} is passed over" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--gpus", "none"], ["--gpus=none"]])
def test_workers_get_the_choice_of_gpus_by_their_environment_alone(
    flags: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker may be given one of several GPUs: the flag would give it all of them again."""
    commands: list[list[str]] = []
    monkeypatch.setattr(
        workers, "run_workers", lambda _, command, *__, **___: commands.append(command)
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")

    assert invoke(["serve", str(folder / "BASE"), *flags, "--port=0"], debug=True) == 0

    ((*_, verb, served, port),) = commands
    assert (verb, served, port) == ("serve", str(folder / "BASE"), "--port=0")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "-1"
