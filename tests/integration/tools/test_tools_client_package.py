"""The distribution `stoker-client`: built, installed into an empty environment, and used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
MAX_BYTES = 5 * 1024 * 1024
"""The largest size of an installed client with its dependencies."""

USE = """
import json, sys
from stoker_client import Connection, NoAnswerError, RestClient

rest, = sys.argv[1:]
rows = [{"fare": 1.5, "place": [1, 2], "company": "Flash"}]
with RestClient(rest) as client:
    half = client.predict("half", [1.0, 2.0]).outputs
    taxi = client.predict("taxi", rows).outputs
    inputs = sorted(client.signatures("taxi")["serving_default"].inputs)
try:
    RestClient("http://127.0.0.1:1").predict("half", [1.0])
except NoAnswerError as error:
    refused = str(error)
try:
    from stoker_client import GrpcClient
    GrpcClient("127.0.0.1:1")
except Exception as error:
    grpc = f"{type(error).__name__}: {error}"
heavy = sorted({"tensorflow", "numpy", "grpc", "google", "yaml", "stoker"} & set(sys.modules))
print(json.dumps([half, taxi, inputs, refused, grpc, heavy]))
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty virtual environment with the wheel of this tree, installed without a registry."""
    folder = tmp_path_factory.mktemp("client")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder / "wheel")]
    subprocess.run(build, cwd=ROOT / "packaging" / "client", check=True, capture_output=True)
    venv.create(folder / "environment", with_pip=True)
    install = [python_of(folder / "environment"), "-m", "pip", "install", "--no-index"]
    install += ["--find-links", str(folder / "wheel"), "stoker-client"]
    subprocess.run(install, check=True, capture_output=True, env=clean())
    return folder / "environment"


def python_of(environment: Path) -> str:
    return str(environment / "bin" / "python")


def packages_of(environment: Path) -> Path:
    (packages,) = environment.glob("lib/python3*/site-packages")
    return packages


def clean() -> dict[str, str]:
    """The environment variables without those of the tests' own Python."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


def test_the_client_alone_calls_a_server_over_rest_and_loads_nothing_heavy(
    served: Any, environment: Path
) -> None:
    command = [python_of(environment), "-c", USE, served.rest]
    done = subprocess.run(command, capture_output=True, text=True, env=clean(), timeout=120)

    assert done.returncode == 0, done.stderr
    half, taxi, inputs, refused, grpc, heavy = json.loads(done.stdout)
    assert half == {"": [2.5, 3.0]}
    assert taxi == {"double": [3.0], "sum": [3], "who": ["Flash!"]}
    assert inputs == ["company", "fare", "place"]
    assert "connection refused" in refused
    assert grpc.startswith("ConfigError: GrpcClient needs grpcio")
    assert "stoker-client[grpc]" in grpc
    assert heavy == []


def test_the_client_and_its_dependencies_take_less_than_5_mb(environment: Path) -> None:
    packages = packages_of(environment)
    own = [path for path in packages.iterdir() if not path.name.startswith(("pip", "setuptools"))]
    names = {path.name for path in own}

    assert {name for name in names if "dist-info" not in name} - {
        "_distutils_hack",
        "distutils-precedence.pth",
        "pkg_resources",
    } == {"stoker_client"}
    files = [file for path in own for file in path.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) < MAX_BYTES


def test_the_installed_client_speaks_grpc_next_to_an_installed_stoker(
    served: Any, environment: Path
) -> None:
    """The tests' environment has what the extra `grpc` installs, and Stoker itself."""
    code = (
        "import sys, json; sys.path.insert(0, sys.argv[1]); import stoker.client, stoker_client\n"
        "assert stoker_client.__file__.startswith(sys.argv[1])\n"
        "with stoker_client.GrpcClient(sys.argv[2]) as client:\n"
        "    answers = client.predict('taxi', [{'fare': 1.5, 'place': [1, 2], 'company': 'x'}])\n"
        "print(json.dumps([answers.outputs['sum'].tolist(), answers.version,\n"
        "    'tensorflow' in sys.modules, stoker_client.RestClient is stoker.client.RestClient]))\n"
    )
    command = [sys.executable, "-c", code, str(packages_of(environment)), served.grpc]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[3], 1, False, False]


def test_a_client_that_imports_more_of_stoker_is_not_built(tmp_path: Path) -> None:
    for folder in ("src/stoker/client", "src/stoker/core", "packaging/client"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "src/stoker/core/version.py").write_text('__version__ = "1.0"\n')
    (tmp_path / "src/stoker/__init__.py").write_text("")
    (tmp_path / "src/stoker/core/__init__.py").write_text("")
    (tmp_path / "src/stoker/client/__init__.py").write_text("from stoker.serve import limits\n")
    for path in (ROOT / "packaging" / "client").iterdir():
        if path.is_file():
            (tmp_path / "packaging" / "client" / path.name).write_bytes(path.read_bytes())
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    done = subprocess.run(
        build, cwd=tmp_path / "packaging" / "client", capture_output=True, text=True
    )

    assert done.returncode
    assert "imports stoker.serve; the client may import core only" in done.stderr + done.stdout
