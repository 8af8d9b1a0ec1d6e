"""Digests of weights: what they depend on, and that those of older runs can still be compared."""

from hashlib import sha256

import pytest
import torch

from benchmarks.harness.tiny_models import tiny_policy
from tba.config import Config, parse
from tba.models.saving import weight_digests
from tba.models.saving.weight_digests import digest, is_known, kind_of, whole_digest


def weights() -> dict[str, torch.Tensor]:
    return {"b": torch.arange(6.0).reshape(2, 3), "a": torch.tensor([1.0, 2.0]).bfloat16(), "c": torch.tensor(3)}


def test_a_digest_in_pieces_is_the_sha256_of_the_list_of_its_pieces(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(weight_digests, "PIECE_BYTES", 16)
    b = weights()["b"].numpy().tobytes()
    lines = [
        f"a torch.bfloat16 [2] {sha256(bytes.fromhex('803f0040')).hexdigest()}",
        f"b torch.float32 [2, 3] {sha256(b[:16]).hexdigest()} {sha256(b[16:]).hexdigest()}",
        f"c torch.int64 [] {sha256((3).to_bytes(8, 'little')).hexdigest()}",
    ]
    assert digest(weights()) == "pieces:" + sha256("".join(f"{it}\n" for it in lines).encode()).hexdigest()


@pytest.mark.parametrize("make", [digest, whole_digest])
def test_a_digest_depends_on_names_types_shapes_and_every_bit(make):
    plain = weights()
    others = [
        {**plain, "d": torch.zeros(0)},
        {("x" if name == "b" else name): it for name, it in plain.items()},
        {**plain, "b": plain["b"].reshape(3, 2)},
        {**plain, "b": plain["b"].view(torch.int32)},
        {**plain, "b": torch.cat([plain["b"].reshape(-1)[:-1], torch.tensor([5.0000005])]).reshape(2, 3)},
        {**plain, "b": plain["b"].flip(0)},
    ]
    assert make(dict(reversed(plain.items()))) == make(plain)
    assert len({make(it) for it in [plain, *others]}) == 1 + len(others)


def test_weights_that_are_not_contiguous_have_the_digest_of_their_values():
    transposed = {"w": torch.arange(6.0).reshape(2, 3).t()}
    assert digest(transposed) == digest({"w": transposed["w"].contiguous()})


def test_a_digest_is_compared_with_one_of_its_own_kind():
    snapshot = tiny_policy(tied=True).snapshot()
    for kind in ("whole", "pieces"):
        assert snapshot.digest_like(stored := snapshot.digest(kind)) == stored and kind_of(stored) == kind
        assert is_known(stored)
    assert snapshot.digest_like(None) == snapshot.sha256
    assert not is_known("later:00") and snapshot.digest_like("later:00") == snapshot.sha256


def test_older_runs_keep_their_kind_of_digest():
    stored = Config().to_dict()
    assert parse(stored).sync.weights_digest == "pieces"
    del stored["sync"]["weights_digest"]
    assert parse(stored).sync.weights_digest == "whole"
    assert parse({"sync": {"every": 4}}).sync.weights_digest == "pieces", "no stored run is so short"
