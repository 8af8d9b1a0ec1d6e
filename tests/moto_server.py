"""moto's server with conditional writes that are atomic, as a real one's are: on its own it looks, then stores.

python -m tests.moto_server -p PORT
"""

import threading
from typing import Any

from moto.s3.responses import S3Response
from moto.server import main

lock, put_object = threading.Lock(), S3Response.put_object


def put_alone(self: S3Response) -> Any:
    with lock:
        return put_object(self)


if __name__ == "__main__":
    S3Response.put_object = put_alone
    main()
