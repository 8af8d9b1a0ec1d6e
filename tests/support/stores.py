"""The kinds of stores that tests run on: a disk, a simulation of S3, and a real S3 server."""

import pytest

from benchmarks.harness.servers import lacking_for_ceph

CEPH = pytest.param("ceph", marks=pytest.mark.ceph)
MOTO = pytest.param("moto", marks=() if lacking_for_ceph() else pytest.mark.long)
"""The simulation. Where the real server is installed, a test that runs on both is long on the simulation."""
S3_SERVERS = (MOTO, CEPH)
STORES = ("local", *S3_SERVERS)
LONG_ON_S3 = (
    pytest.param("moto", marks=pytest.mark.long),
    pytest.param("ceph", marks=(pytest.mark.ceph, pytest.mark.long)),
)
long_on_s3 = pytest.mark.parametrize("root", ["local", *LONG_ON_S3], indirect=True)
"""Marks a test that takes long on S3 servers, and of which others do the most important part there."""
only_s3 = pytest.mark.parametrize("root", S3_SERVERS, indirect=True)
