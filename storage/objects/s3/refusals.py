"""Classifies the answers of an S3 server: final refusals, failures that another try may change, and incomplete
answers."""

import re
from typing import Any

import aiohttp
import botocore.exceptions
import botocore.parsers

UNANSWERED = (
    botocore.exceptions.ConnectionError,
    botocore.exceptions.HTTPClientError,
    botocore.exceptions.IncompleteReadError,
    botocore.parsers.ResponseParserError,
    aiohttp.ClientError,
    OSError,  # includes TimeoutError
)
_TRY_AGAIN = {408, 409, 429}  # and every status from 500 on but 501
_TRY_AGAIN_CODES = {"RequestTimeout", "SlowDown", "XAmzContentSHA256Mismatch", "IncompleteBody", "BadDigest"}
_ESSENTIAL = {
    "get_object": "ETag",
    "head_object": "ETag",
    "put_object": "ETag",
    "create_multipart_upload": "UploadId",
    "upload_part": "ETag",
    "complete_multipart_upload": "ETag",
    "list_objects_v2": "IsTruncated",
}
"""For each operation, a field that all its answers have, even an empty listing. If an answer lacks the field, something
between server and client has replaced the answer."""


class Refused(Exception):
    """A final refusal by the server: another try would get the same answer."""

    def __init__(self, status: int, code: str, message: str):
        super().__init__(f"{code}: {message}" if message else code)
        self.status = status
        self.code = code


class CutShort(OSError):
    """An answer that is incomplete, though the connection reports no error."""


def final_refusal(error: Exception, operation: str) -> Refused | None:
    """Return the final refusal that an error stands for; None if another try may succeed."""
    if said := _refusal(error):
        busy = said.status in _TRY_AGAIN or (said.status >= 500 and said.status != 501)
        # The body of a 404 says what is missing: object, bucket or upload. Only the answer to HEAD has no body.
        bare = said.status == 404 and said.code == "404" and operation != "head_object"
        return None if busy or bare or said.code in _TRY_AGAIN_CODES else said
    if isinstance(error, UNANSWERED) and not isinstance(error, botocore.exceptions.SSLError):
        return None
    return Refused(0, type(error).__name__, describe(error))


def describe(error: Exception) -> str:
    """Return what went wrong with a request. Passwords in URLs are removed."""
    text = str(_refusal(error) or error) or ("no answer" if isinstance(error, TimeoutError) else type(error).__name__)
    return re.sub(r"//[^/@\s]*@", "//", text)  # an endpoint may carry a password


def check_whole(operation: str, answer: dict[str, Any]) -> None:
    """Raise CutShort if a part of the body of an answer is missing, or if the answer lacks the field that every answer
    to this operation has."""
    if operation == "get_object":
        expected = _promised_bytes(answer)
        if expected not in (None, len(answer["Body"])):
            raise CutShort(f"only {len(answer['Body'])} of {expected} bytes were received")
    essential = _ESSENTIAL.get(operation, "ResponseMetadata")
    if essential not in answer:
        raise CutShort(f"the answer came without its {essential}")


def _refusal(error: Exception) -> Refused | None:
    """Return the refusal of the server that an error carries; None if the error is not an answer of the server."""
    response = getattr(error, "response", None) or getattr(error.__cause__, "response", None)
    if not isinstance(response, dict):
        return None
    status, said = response["ResponseMetadata"]["HTTPStatusCode"], response.get("Error", {})
    return Refused(status, str(said.get("Code") or status), str(said.get("Message") or ""))


def _promised_bytes(answer: dict[str, Any]) -> int | None:
    """Return how many bytes the body of an answer must have, according to its range or to the `length` in our own
    metadata; None if neither says so. Content-Length is not used."""
    if part := re.fullmatch(r"bytes (\d+)-(\d+)/.*", answer.get("ContentRange", "")):
        return int(part[2]) - int(part[1]) + 1
    length = answer.get("Metadata", {}).get("length", "")
    return int(length) if length.isdecimal() else None
