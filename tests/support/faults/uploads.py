"""Uploads that begin and never end."""

from functools import partial

from storage.objects.s3.store import S3Store
from storage.objects.store import Store


def begin_upload(store: Store, key: str) -> None:
    """Leave an unfinished upload, as a killed writer does."""
    if path := store.local_path(key):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_name(f".{path.name}.0123456789ab").write_bytes(b"half")
        return
    assert isinstance(store, S3Store)
    requests = store.requests
    begun = requests.run(requests.send, "create_multipart_upload", key)
    requests.run(partial(requests.send, "upload_part", key, PartNumber=1, UploadId=begun["UploadId"], Body=b"half"))
