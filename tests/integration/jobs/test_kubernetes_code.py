"""The code of a job comes to its pods through a bucket of a real emulator of S3."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import pytest
from tests.integration.data.conftest import Faults, StoreServer, started
from tests.integration.jobs.kubernetes_jobs import KubernetesJobs

from stoker.core.errors import DataError, UserError
from stoker.jobs.archive import CODE
from stoker.jobs.code_store import fetch_code, put_code
from stoker.jobs.provider import Phase

FOLDER = "s3://jobs/code of jobs"
CONTENT = b"code" * 1000
DIGEST = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreServer]:
    folder = tmp_path_factory.mktemp("store")
    with started("s3", folder) as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment().items():
            patch.setenv(name, value)
        server.system().create_dir("jobs")
        yield server


def test_code_is_put_once_and_verified_after_the_download(bucket: StoreServer) -> None:
    bucket.put(f"jobs/code of jobs/{DIGEST}.tar.gz", CONTENT[:10])
    put_code(FOLDER, DIGEST, CONTENT)
    bucket.proxy.faults = Faults()
    put_code(FOLDER, DIGEST, CONTENT)
    assert {line.partition(" ")[0] for line in bucket.faults.seen} == {"HEAD"}

    bucket.faults.answer_503 = 1
    bucket.faults.cut_bodies = 1
    assert fetch_code(FOLDER, DIGEST) == CONTENT

    bucket.put(f"jobs/code of jobs/{DIGEST}.tar.gz", CONTENT[:-1] + b"x")
    with pytest.raises(DataError, match=r"must be the code that was submitted\. Received: SHA"):
        fetch_code(FOLDER, DIGEST)
    with pytest.raises(DataError, match=r"must be the code that .*Received: no such object"):
        fetch_code(FOLDER, "0" * 64)


def test_a_bucket_that_cannot_be_written_is_one_line(bucket: StoreServer) -> None:
    with pytest.raises(UserError) as caught:
        put_code("s3://missing/code", DIGEST, CONTENT)
    assert "s3://missing/code" in caught.value.line()
    assert "data.source" not in caught.value.line()
    with pytest.raises(UserError, match=r"^code must name a bucket"):
        put_code("s3://", DIGEST, CONTENT)


def test_pods_fetch_the_code_that_the_volume_does_not_have(
    kubernetes: KubernetesJobs, bucket: StoreServer
) -> None:
    kubernetes.cluster.paused.set()
    settings = {"code": FOLDER, "environment": bucket.environment()}
    job = kubernetes.submit("fetched", "3", settings=settings)
    archive = job.place / CODE
    content = archive.read_bytes()
    archive.unlink()
    kubernetes.cluster.paused.clear()

    kubernetes.wait(job, Phase.DONE)
    assert archive.read_bytes() == content
    kubernetes.require_whole_count(job, 3)


def test_a_submission_whose_code_is_refused_creates_nothing(
    kubernetes: KubernetesJobs, bucket: StoreServer
) -> None:
    with pytest.raises(UserError):
        kubernetes.submit("refused", "3", settings={"code": "s3://missing/code"})
    assert kubernetes.provider().jobs()[0].id.startswith("fetched-")
