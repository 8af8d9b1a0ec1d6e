"""Answers of an S3 server: which errors are final, and which answers are incomplete."""

from typing import Any

import botocore.exceptions
import pytest

from storage.objects.s3.refusals import CutShort, check_whole, describe, final_refusal


def refused(status: int, code: str) -> botocore.exceptions.ClientError:
    error: dict[str, Any] = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return botocore.exceptions.ClientError(error, "PutObject")


@pytest.mark.parametrize(
    ("status", "code", "is_final"),
    [
        (412, "PreconditionFailed", True),
        (403, "AccessDenied", True),
        (404, "NoSuchKey", True),
        (501, "NotImplemented", True),
        (404, "404", False),
        (409, "ConditionalRequestConflict", False),
        (429, "SlowDown", False),
        (503, "SlowDown", False),
        (400, "BadDigest", False),
    ],
)
def test_an_answer_is_final_unless_another_try_may_do_better(status: int, code: str, is_final: bool):
    answer = final_refusal(refused(status, code), "put_object")
    assert (answer is not None) == is_final
    assert answer is None or (answer.status, answer.code) == (status, code)


def test_only_a_head_is_refused_by_a_404_without_a_body():
    assert final_refusal(refused(404, "404"), "head_object") is not None
    assert final_refusal(refused(404, "404"), "get_object") is None


def test_a_request_that_nobody_answered_is_tried_again_and_one_that_cannot_be_sent_is_not():
    assert final_refusal(TimeoutError(), "put_object") is None
    assert final_refusal(botocore.exceptions.NoCredentialsError(), "put_object") is not None


def test_an_error_is_described_without_the_password_of_its_endpoint():
    assert describe(OSError("cannot reach http://me:hunter2@host/x")) == "cannot reach http://host/x"
    assert describe(TimeoutError()) == "no answer"


@pytest.mark.parametrize(
    ("operation", "answer"),
    [
        ("get_object", {"ETag": "x", "Body": b"abc", "Metadata": {"length": "4"}}),
        ("get_object", {"ETag": "x", "Body": b"abc", "ContentRange": "bytes 10-13/20"}),
        ("get_object", {"Body": b"abc"}),
        ("list_objects_v2", {"ResponseMetadata": {}}),
        ("delete_object", {}),
    ],
)
def test_an_answer_that_is_not_whole_is_cut_short(operation: str, answer: dict[str, Any]):
    with pytest.raises(CutShort):
        check_whole(operation, answer)


def test_an_answer_that_is_whole_passes():
    check_whole("get_object", {"ETag": "x", "Body": b"abc", "Metadata": {"length": "3"}})
    check_whole("get_object", {"ETag": "x", "Body": b"abc", "ContentRange": "bytes 10-12/20", "Metadata": {}})
    check_whole("delete_object", {"ResponseMetadata": {}})
