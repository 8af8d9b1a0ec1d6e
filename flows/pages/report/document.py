"""A report as one file: its layout, its scripts with the policy that lets nothing else run, and its clocks."""

import json
import math
import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import duckdb
from markupsafe import Markup

from flows.pages.charts import MEASURES
from flows.pages.rendering import STYLE, digest, render
from flows.pages.tables import Table
from storage.objects.damage import Damage
from tba.errors import ConfigError

_MOST_TICKS = 1500  # of a clock
_NAMES = ("charts.js", "samples.js")
_SCRIPTS = [files("flows.pages.report").joinpath(name).read_text(encoding="utf-8") for name in _NAMES]
_SOURCES = " ".join(map(digest, _SCRIPTS))
_POLICY = f"default-src 'none'; style-src {digest(STYLE)}; script-src {_SOURCES}; img-src data:"
_HEADING = re.compile(r"<h2 id='([\w-]+)'>([^<]+)</h2>")

CLOCK = "select step, sum(coalesce(seconds_step, 0)) over (order by step) from steps order by step"

Clock = tuple[list[int], list[float]]
"""Steps, and the seconds that the trainer of a run had worked after each of them. Pauses between lives do not count."""


def clock(con: duckdb.DuckDBPyConnection) -> Clock:
    rows = con.execute(CLOCK).fetchall()
    every = math.ceil(len(rows) / _MOST_TICKS) or 1
    seen = [row for n, row in enumerate(rows, start=1) if n % every == 0 or n == len(rows)]
    return [0, *(step for step, _ in seen)], [0.0, *(round(seconds, 3) for _, seconds in seen)]


def document(template: str, title: str, clocks: Sequence[Clock], **variables: Any) -> Markup:
    """Return a report. `template` is its file in templates/report/."""
    return render(
        f"report/{template}",
        title=title,
        clocks=json.dumps(clocks),
        policy=_POLICY,
        scripts=list(map(Markup, _SCRIPTS)),
        measures=json.dumps(MEASURES),
        headings=_headings,
        **variables,
    )


def _headings(content: Markup) -> list[tuple[str, Markup]]:
    return [(name, Markup(text)) for name, text in _HEADING.findall(content)]


def damage_table(damage: Sequence[Damage]) -> Table:
    return Table(["object", "problem"], [(it.key, it.problem) for it in damage])


def save(page: str, path: Path) -> Path:
    try:
        path.write_text(page, encoding="utf-8", errors="replace")  # a lone surrogate cannot be encoded
    except OSError as error:
        raise ConfigError(f"--output: {path}: {error.strerror}") from None
    return path
