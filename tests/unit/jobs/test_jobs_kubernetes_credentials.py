"""The official client and the credentials of a cluster: what is missing is one line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from stoker.core.errors import ConfigError
from stoker.jobs.providers.kubernetes.client import Cluster
from stoker.jobs.providers.kubernetes.problems import AnswerLost
from stoker.jobs.providers.kubernetes.provider import KubernetesProvider
from stoker.jobs.providers.kubernetes.settings import KubernetesTarget

KUBECONFIG = """\
apiVersion: v1
kind: Config
current-context: here
clusters: [{name: c, cluster: {server: "http://127.0.0.1:9"}}]
users: [{name: u, user: {token: t}}]
contexts:
- {name: here, context: {cluster: c, user: u, namespace: vision}}
- {name: there, context: {cluster: c, user: u}}
"""


@pytest.fixture
def kubeconfig(tmp_path: Path) -> Path:
    path = tmp_path / "kubeconfig"
    path.write_text(KUBECONFIG)
    return path


def test_the_namespace_is_that_of_the_target_else_of_the_context(kubeconfig: Path) -> None:
    found = [
        Cluster(kubeconfig=kubeconfig, context=context, namespace=namespace).namespace
        for context, namespace in ((None, None), ("there", None), ("here", "other"))
    ]
    assert found == ["vision", "default", "other"]


def test_without_credentials_one_line_says_where_they_belong(
    kubeconfig: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    (tmp_path / "damaged").write_text("a: [")
    for file, context in ((None, None), (tmp_path / "damaged", None), (kubeconfig, "nowhere")):
        with pytest.raises(ConfigError, match="must be in a kubeconfig") as error:
            Cluster(kubeconfig=file, context=context, namespace=None)
        assert "\n" not in str(error.value)


def test_without_the_extra_one_line_says_how_to_install_it(
    kubeconfig: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    with pytest.raises(ConfigError, match=r'pip install "stoker\[kubernetes\]"'):
        Cluster(kubeconfig=kubeconfig, context=None, namespace=None)


def test_a_server_that_does_not_answer_is_one_line(
    kubeconfig: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stoker.jobs.providers.kubernetes.client.PAUSE_S", 0.001)
    target = KubernetesTarget(image="a", kubeconfig=kubeconfig)
    with pytest.raises(AnswerLost, match="the cluster's API must answer") as error:
        KubernetesProvider("team", target).jobs()
    assert "\n" not in str(error.value)


def test_other_targets_load_no_client() -> None:
    code = (
        "import sys; from pathlib import Path; from stoker.jobs.targets import read_targets; "
        "found = read_targets({'k': {'provider': 'kubernetes', 'image': 'a'}}, file=Path('stoker.yaml')); "
        "found['k'].open(); print([name for name in sys.modules if name in ('kubernetes', 'urllib3')])"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
