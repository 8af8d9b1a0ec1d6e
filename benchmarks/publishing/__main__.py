"""Measure publishing a version and adopting it, by stages, and count how often each stage passes over the bytes.

    python -m benchmarks.publishing [--hidden 1024 --layers 12] [--versions 5] [--counts]

A policy with float32 weights is published in bfloat16 on a local disk, each version a small step from the one before.
The stages of this code and the same work as separate passes, one after the other and without threads, run in turn in
one process. Both publish the same bytes, in as many files as a version of 15 GB has. Seconds are medians; a ratio is
the median of the ratios of the versions.

- *copy*: copy the weights into main memory
- *digest*: the digest of the float32 weights, for the ledger
- *write*: convert, write and hash the files, and compare them with the version before
- *store*: put the files into the run, on the disk itself, and then the manifest
- *verify*: verify the files for the first process of a host
- *again*: the same for every further process of the host

`passes` are counted while the stages run: bytes hashed, read, written and mapped per published byte. From these counts
follow the last columns: the seconds that a version of 15 GB takes on devices of given speeds, which `--speeds` names.
With `--counts`, print only the counts, as JSON.
"""

import argparse
import hashlib
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from benchmarks.publishing import byte_counts
from benchmarks.publishing.byte_counts import Counts, counting

byte_counts.install()

import numpy as np  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from safetensors import safe_open  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

from benchmarks.harness.tiny_models import tiny_tokenizer  # noqa: E402
from benchmarks.publishing.publisher import Publisher, Stage  # noqa: E402
from storage.runs.run import Run  # noqa: E402
from tba.models.policy import Policy, Snapshot  # noqa: E402
from tba.models.saving import weight_files  # noqa: E402
from tba.models.saving.weight_digests import whole_digest  # noqa: E402

WHO = ("separate", "ours")
STAGES = ("copy", "digest", "write", "store", "verify", "again")
LARGE = 15e9
"""Bytes of the published version for which the devices' seconds are computed: 7.5 billion weights in bfloat16."""
FILES = 14
"""Files of such a version: files and pieces are what threads can work on side by side."""
SPEEDS = {"disk": 3e9, "memory": 10e9, "hash": 1.5e9, "threads": 16.0, "bus": 20e9}
"""Bytes a second of the disk, of reading what lies in memory, of one thread that hashes, and of the GPU's bus; and the
number of threads."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--versions", type=int, default=5)
    parser.add_argument("--speeds", type=json.loads, default={}, help="for example '{\"disk\": 1e9}'")
    parser.add_argument("--counts", action="store_true", help="print only the passes of this code, as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TBA_CACHE"] = f"{folder}/cache"
        seconds, counts, size = measure(options, Path(folder))
    if options.counts:
        print(json.dumps({stage: passes(counts["ours", stage], size) for stage in STAGES}))
        return
    show(seconds, counts, size, {**SPEEDS, **options.speeds})


def measure(
    options: argparse.Namespace, folder: Path
) -> tuple[dict[tuple[str, str], list[float]], dict[tuple[str, str], Counts], int]:
    """Return the seconds and the bytes of each stage, of this code and of separate passes, and the size of a
    version."""
    policy = make_policy(options)
    size = 2 * sum(it.numel() for it in policy.model.parameters())
    weight_files.FILE_BYTES = size // FILES
    seconds, counts = dict[tuple[str, str], list[float]](), dict[tuple[str, str], Counts]()
    run = Run.create(str(folder), "publishing", config={}, sampler_sql="", code_version="")
    inside = Path(run.url) / ".scratch"  # a trainer writes on the disk of its run
    inside.mkdir()

    @contextmanager
    def stage(who: str, name: str) -> Iterator[None]:
        began = time.perf_counter()
        with counting() as counted:
            yield
        seconds.setdefault((who, name), []).append(time.perf_counter() - began)
        counts[who, name] = counted

    whose = {"ours": Publisher(run, inside), "separate": SeparatePasses(folder)}
    for number in range(options.versions + 1):
        for who in ("ours", "separate") if number % 2 and not options.counts else ("separate", "ours"):
            if who == "ours" or not options.counts:
                whose[who].publish(policy, number, lambda name, who=who: stage(who, name))
        if number == 0:  # nothing to compare with
            seconds.clear()
        take_step(policy)
    return seconds, counts, size


class SeparatePasses:
    """The same work in the plainest way: one pass for each purpose, one after the other."""

    def __init__(self, folder: Path):
        self.folder, self.before = folder, None

    def publish(self, policy: Policy, number: int, stage: Stage) -> None:
        folder, stored = self.folder / f"scratch-{number}", self.folder / f"stored-{number}"
        with stage("copy"):
            snapshot = policy.snapshot()
            assert isinstance(snapshot, Snapshot)
        with stage("digest"):
            whole_digest(snapshot.model.state_dict())
        with stage("write"):
            snapshot.model.to(torch.bfloat16).save_pretrained(folder, max_shard_size=weight_files.FILE_BYTES)  # pyright: ignore
            digests = {path.name: digest_of(path) for path in sorted(folder.iterdir())}
            if self.before:
                changed_share(self.before, folder)
        with stage("store"):
            stored.mkdir()
            for name in digests:
                copy(folder / name, stored / name)
        for name in ("verify", "again"):
            with stage(name):
                assert all(digest_of(stored / it) == digest for it, digest in digests.items())
        if self.before:
            shutil.rmtree(self.before)
        shutil.rmtree(stored)
        self.before = folder


def digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def copy(source: Path, target: Path) -> None:
    with source.open("rb") as old, target.open("wb") as new:
        shutil.copyfileobj(old, new, 2**20)
        new.flush()
        os.fsync(new.fileno())


def changed_share(before: Path, after: Path) -> float:
    """Return the share of the weights that differ. Both versions are read from their files."""
    changed = total = 0
    for path in sorted(after.glob("*.safetensors")):
        with safe_open(before / path.name, "pt") as old, safe_open(path, "pt") as new:
            for name in new.offset_keys():
                a, b = (it.get_tensor(name).reshape(-1).view(torch.int16).numpy() for it in (old, new))
                changed, total = changed + int(np.count_nonzero(a != b)), total + len(a)
    return changed / total


def make_policy(options: argparse.Namespace) -> Policy:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=options.vocabulary, hidden_size=options.hidden, intermediate_size=options.hidden * 11 // 4,
        num_hidden_layers=options.layers, num_attention_heads=options.hidden // 64,
        num_key_value_heads=options.hidden // 64, max_position_embeddings=1024, tie_word_embeddings=False,
        pad_token_id=0, bos_token_id=None, eos_token_id=1,
    )  # fmt: skip
    return Policy(LlamaForCausalLM(config).eval(), tiny_tokenizer(), torch.device("cpu"))


@torch.no_grad()
def take_step(policy: Policy) -> None:
    for parameter in policy.model.parameters():
        parameter.mul_(1 + 1e-5)


def passes(counts: Counts, size: int) -> dict[str, float]:
    return {name: round(nbytes / size, 2) for name, nbytes in asdict(counts).items()}


def on_devices(who: str, stage: str, counts: Counts, size: int, speeds: Mapping[str, float]) -> float:
    """Return the seconds of a stage for a version of 15 GB, as the sum of the times of its passes. Files were read from
    the disk's cache, in memory, and written there; `store` waits for the disk."""
    each = passes(counts, size)
    threads = min(speeds["threads"], FILES) if who == "ours" else 1
    moved = (each["read"] + each["mapped"] + each["written"]) / (threads * speeds["memory"])
    seconds = each["hashed"] / (threads * speeds["hash"]) + moved
    seconds += 3 / (threads * speeds["memory"]) if stage == "write" else 0  # reads weights of 4 bytes, writes 2
    seconds += 2 / speeds["bus"] if stage == "copy" else 0  # 4 bytes of each weight, of which 2 are published
    seconds += 1 / speeds["disk"] if stage == "store" else 0
    return LARGE * seconds


def show(
    seconds: Mapping[tuple[str, str], list[float]],
    counts: Mapping[tuple[str, str], Counts],
    size: int,
    speeds: Mapping[str, float],
) -> None:
    print(f"a version of {size / 1e6:,.0f} MB; devices: {dict(speeds)}\n")
    columns = ["separate passes, s", "ours, s", "ratio", "passes, separate", "passes, ours", "15 GB, separate, s"]
    print(f"| stage | {' | '.join([*columns, '15 GB, ours, s'])} |\n|---|{'---:|' * 7}")
    there = {(who, it): on_devices(who, it, counts[who, it], size, speeds) for who in WHO for it in STAGES}
    for name, stages in (*((it, (it,)) for it in STAGES), ("copy to store", STAGES[:4]), ("all", STAGES)):
        times = [[sum(it) for it in zip(*(seconds[who, stage] for stage in stages), strict=True)] for who in WHO]
        ratio = statistics.median(theirs / ours for theirs, ours in zip(*times, strict=True))
        shown = [in_words(passes(counts[who, name], size)) if name in STAGES else "" for who in WHO]
        large = (f"{sum(there[who, stage] for stage in stages):.1f}" for who in WHO)
        print(
            "|",
            " | ".join([name, *(f"{statistics.median(it):.2f}" for it in times), f"{ratio:.1f}", *shown, *large]),
            "|",
        )


def in_words(each: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {many:g}" for name, many in each.items() if many >= 0.05) or "none"


if __name__ == "__main__":
    main()
