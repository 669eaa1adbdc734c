"""What tests of an object store have in common."""

import pytest
import small_encoder
from s3_server import Bucket, S3Server

from xret.pipeline.cache.storage import lease


@pytest.fixture(scope="session")  # s3fs keeps its connections
def server():
    server = S3Server()
    yield server
    server.stop()


@pytest.fixture
def environment(server, monkeypatch):
    server.use(monkeypatch)
    monkeypatch.setattr(lease, "PERIOD", 0.1)
    monkeypatch.setattr(lease, "PATIENCE", 0.6)
    small_encoder.use(monkeypatch)


@pytest.fixture
def bucket(server, environment):
    return Bucket(server)
