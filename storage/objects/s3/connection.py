"""Makes connections to S3. All stores of a process share one connection per AWS_* environment and read timeout."""

import os
import threading
from functools import lru_cache

import botocore.exceptions
import s3fs

from storage.objects.s3.refusals import describe
from tba.errors import ConfigError

SILENCE = 30.0
"""Seconds after which a try ends if the server sends nothing; half of the deadline if that is shorter."""

_SETTINGS = {
    "connect_timeout": 5,
    "max_pool_connections": 64,
    "retries": {"total_max_attempts": 1, "mode": "standard"},
    # Not every server knows the newer checksums. Objects that need verification have a sha256 in our own records.
    "request_checksum_calculation": "when_required",
    "response_checksum_validation": "when_required",
}
_connecting = threading.Lock()


def connect(*, deadline: float) -> s3fs.S3FileSystem:
    """Return the connection for the AWS_* environment and for requests that end after `deadline` seconds."""
    with _connecting:
        return _connect(_environment(), min(SILENCE, deadline / 2))


def _environment() -> tuple[tuple[str, str], ...]:
    """Return what a connection depends on: the AWS_* variables, and the process id, because the connection's thread
    does not survive `os.fork`."""
    settings = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    return (*sorted(settings.items()), ("pid", str(os.getpid())))


@lru_cache(maxsize=8)
def _connect(environment: tuple[tuple[str, str], ...], silence: float) -> s3fs.S3FileSystem:
    settings = {**_SETTINGS, "read_timeout": silence}
    connection = s3fs.S3FileSystem(skip_instance_cache=True, use_listings_cache=False, config_kwargs=settings)
    connection.retries = 1
    try:
        connection.connect()
    except (botocore.exceptions.BotoCoreError, ValueError) as error:
        raise ConfigError(f"AWS_* environment variables: no connection to S3 can be made: {describe(error)}") from None
    return connection
