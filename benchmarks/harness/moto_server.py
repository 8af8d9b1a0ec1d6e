"""moto's server with conditional writes that are atomic, as a real one's are: on its own it looks, then stores.

It also tells when an upload began, which moto does not know. An upload to a key with `begun-long-ago` in its name began
long ago, and the parts of one with `sent-long-ago` were sent long ago.

python -m benchmarks.harness.moto_server -p PORT
"""

import threading
from datetime import UTC, datetime
from typing import Any

from moto.s3.models import FakeKey, FakeMultipart
from moto.s3.responses import S3Response
from moto.server import main

LONG_AGO = datetime(2010, 11, 10)

lock, put_object = threading.Lock(), S3Response.put_object
make_upload, set_part, serialized = FakeMultipart.__init__, FakeMultipart.set_part, S3Response.serialized
began: dict[str, datetime] = {}  # by identity of the upload


def put_alone(self: S3Response) -> Any:
    with lock:
        return put_object(self)


def make_dated_upload(self: FakeMultipart, key_name: str, *arguments: Any, **options: Any) -> None:
    make_upload(self, key_name, *arguments, **options)
    began[self.id] = LONG_AGO if "begun-long-ago" in key_name else datetime.now(UTC)


def set_dated_part(self: FakeMultipart, part_id: int, value: bytes) -> FakeKey:
    part = set_part(self, part_id, value)
    if "sent-long-ago" in self.key_name:
        part.last_modified = LONG_AGO
    return part


def serialized_with_dates(self: S3Response, action_result: Any) -> Any:
    result = action_result.result
    if isinstance(result, dict):
        for upload in result.get("Uploads", ()):
            upload["Initiated"] = f"{began[upload['UploadId']]:%Y-%m-%dT%H:%M:%S.000Z}"
    return serialized(self, action_result)


if __name__ == "__main__":
    S3Response.put_object = put_alone
    FakeMultipart.__init__ = make_dated_upload
    FakeMultipart.set_part = set_dated_part
    S3Response.serialized = serialized_with_dates
    main()
