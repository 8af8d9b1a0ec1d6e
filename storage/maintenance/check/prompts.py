"""Checks the prompts of each split, and the records that hold their digests."""

from collections.abc import Mapping

from storage import layout
from storage.log.prompts import PROMPTS_SCHEMA
from storage.maintenance.check.context import CheckContext
from storage.objects import parquet
from storage.objects.digests import Digest


def check_prompts(context: CheckContext) -> None:
    """Check that the prompts are stored if there are trajectories or evaluations, and that all stored prompts are
    undamaged. Add the prompts of the training split to the relations."""
    listed = context.listed[layout.PROMPTS]
    for prefix, split in ((layout.TRAJECTORIES, "train"), (layout.EVALUATIONS, "test")):
        key = layout.prompts(split)
        if context.listed[prefix] and key not in listed:
            context.findings.report(key, f"is missing, but there are {prefix.rstrip('/')}")
    digests = _check_records(context)
    stored = {key: split for key in listed if (split := layout.parse_prompts(key))}
    _check_every_record_is_there(context, {key: split for key, split in stored.items() if split not in digests})
    for key, split in stored.items():
        with context.findings.looking_at(key):
            _check_split(context, key, digests.get(split))


def _check_records(context: CheckContext) -> dict[str, Digest]:
    """Check the records of prompts. Return the digest of each split that has a readable record."""
    findings, listed = context.findings, context.listed[layout.PROMPTS]
    digests: dict[str, Digest] = {}
    for key in listed:
        if layout.parse_prompts(key) is None:
            with findings.looking_at(key):
                record = context.records.decode(key, "split", "bytes", "sha256")
                split = record["split"]
                if key != layout.prompts_record(split):
                    findings.report(key, f"is the record of another split, {split!r}")
                if layout.prompts(split) not in listed:
                    findings.report_unless_known(layout.prompts(split), f"is missing, but {key} names it")
                digests[split] = Digest.decode(record)
    return digests


def _check_every_record_is_there(context: CheckContext, lacking: Mapping[str, str]) -> None:
    """Report that the record of each object in `lacking` is missing; `lacking` has the split of each object by key.
    Only note this in older runs, which have no such records, and in a run without syncs, whose trainer may be about to
    write them."""
    for key, split in lacking.items():
        record_key = layout.prompts_record(split)
        if record_key in context.listed[layout.PROMPTS]:
            continue  # the record exists but cannot be read, which is already reported
        if context.run.owner_of(key).digests and context.listed[layout.SYNCS]:
            context.findings.report(record_key, "is missing")
        else:
            context.findings.note(f"{key} has no digest and is not verified")


def _check_split(context: CheckContext, key: str, digest: Digest | None) -> None:
    data = context.reading.read(key)
    if digest:
        digest.verify(data, key)
    prompts = parquet.decode(data, key, PROMPTS_SCHEMA)
    if doubled := len(prompts) - len(set(prompts["prompt_id"].to_pylist())):
        context.findings.report(key, f"has {doubled} rows with a prompt_id that occurs before")
    if key == layout.prompts("train"):
        context.relations.add_prompts(prompts, key=key)
    context.findings.count("prompts", len(prompts))
