"""A short report of a run as Markdown: its versions with their scores, its curves, and what went wrong."""

import shutil
import sys
from base64 import b64encode
from pathlib import Path
from typing import Any, NamedTuple

from flows.pages.report.curves import pictures
from flows.planning.describe import describe
from flows.queries.damage_report import damage_of, in_words
from storage import layout
from storage.objects.damage import DamageLog
from storage.objects.manifest_folders import read_manifest
from storage.queries.views import connect
from storage.runs.events import read_events
from storage.runs.run import Run
from storage.weights.evaluations import Evaluations
from storage.weights.versions import Versions
from tba.config import parse_known
from tba.types import Version


class Published(NamedTuple):
    """A version that is kept, or that was scored before it was removed."""

    version: Version
    step: int
    size: int | None  # bytes, while it is kept
    sha256: str
    scores: dict[str, float]

    def row(self) -> dict[str, Any]:
        size = "" if self.size is None else f"{self.size / 1e6:.1f} MB"
        scores = {metric: round(value, 4) for metric, value in self.scores.items()}
        return {"version": str(self.version), "step": self.step, "size": size, "sha256": self.sha256[:12], **scores}


class Publications:
    """The versions of a run that are kept or were scored, oldest first. Each manifest is read once, as it never
    changes."""

    def __init__(self, run: Run):
        self.run = run
        self.manifests: dict[Version, dict[str, Any]] = {}
        self.damage = DamageLog()  # of what is left out

    def all(self) -> list[Published]:
        kept = Versions(self.run).complete()
        for version in kept:
            if version not in self.manifests:
                with self.damage.looking_at(layout.version(version) + layout.MANIFEST):
                    if found := read_manifest(self.run.store, layout.version(version)):
                        self.manifests[version] = found
        scores: dict[Version, dict[str, float]] = {}
        steps: dict[Version, int] = {}
        for score in Evaluations(self.run).scores(self.damage.looking_at):
            scores.setdefault(score.version, {})[score.metric] = score.value
            steps[score.version] = score.step
        known = (set(kept) & self.manifests.keys()) | scores.keys()
        return [
            self._one(v, v in kept, steps.get(v, 0), scores.get(v, {})) for v in sorted(known, key=lambda v: v.order)
        ]

    def _one(self, version: Version, is_kept: bool, step: int, scores: dict[str, float]) -> Published:
        manifest = self.manifests.get(version)
        if manifest is None:
            return Published(version, step, None, "", scores)
        size = sum(file["bytes"] for file in manifest["files"]) if is_kept else None
        return Published(version, manifest["step"], size, manifest["sha256"], scores)


def markdown(run: Run) -> str:
    """Return the report: scores, curves, settings, warnings and errors, and commands to try next."""
    config = parse_known(run.config)
    with connect(run) as con:
        damage = damage_of(con)
    scored = [published.row() for published in Publications(run).all() if published.scores]
    troubles = [event for event in read_events(run) if event["severity"] != "info"]
    parts = [
        f"# Run {run.name}",
        f"`{run.url}`, created {run.created_at}, code {run.code_version}",
        *([f"**{in_words(run, damage)}**"] if damage else []),
        "## Scores",
        table(scored) if scored else "No version has been scored yet.",
        *(f"![{title}](data:image/svg+xml;base64,{b64encode(svg.encode()).decode()})" for title, svg in pictures(run)),
        "## Settings",
        f"```\n{describe(config)}\n```",
        "## Warnings and errors",
        table([{name: event[name] for name in ("at", "role", "kind", "message")} for event in troubles[-50:]])
        if troubles
        else "None.",
        "## Where to look next",
        f"```\n{where_next(run)}\n```",
    ]
    return "\n\n".join(parts)


def last_scores(run: Run) -> str:
    """Return the scores of the newest version that was scored, in one line."""
    scores = Evaluations(run).scores(DamageLog().looking_at)
    found = [score for score in scores if score.version == scores[-1].version]
    if not found:
        return "no version has been scored"
    told = ", ".join(f"{score.metric} {score.value:.4g}" for score in found)
    return f"version {found[0].version.number}, step {found[0].step}: {told}"


def where_next(run: Run) -> str:
    """Return commands that show more of the run, one per line. They work even if `tba` is not on the path."""
    tba = "tba" if shutil.which("tba") else str(Path(sys.executable).with_name("tba"))
    rewards = "select version_start, avg(reward) from trajectories group by 1 order by 1"
    replays = run.parent is not None and run.parent.replays is not None
    learned = "select step, loss, grad_norm from steps order by step"  # what a replay has that its parent has not
    return "\n".join(
        [
            f"{tba} report {run.url}",
            f'{tba} sql {run.url} "{learned if replays else rewards}"',
            f'{tba} sql {run.url} "select * from evaluations order by step"',
            f"{tba} check {run.url}",
        ]
    )


def table(rows: list[dict[str, Any]]) -> str:
    """Return a Markdown table with a column for every key."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [names, ["---"] * len(names), *([_cell(row.get(name, "")) for name in names] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")
