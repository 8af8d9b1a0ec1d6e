"""A report as one file: its layout, its charts, and its scripts with the policy that lets nothing else run."""

import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import duckdb
from markupsafe import Markup

from flows.pages.charts import Chart, Clock
from flows.pages.rendering import STYLE, digest, render
from flows.pages.tables import Table
from storage.objects.damage import Damage
from tba.errors import ConfigError

_NAMES = ("charts.js", "samples.js")
_SCRIPTS = [files("flows.pages.report").joinpath(name).read_text(encoding="utf-8") for name in _NAMES]
_SOURCES = " ".join(map(digest, _SCRIPTS))
_POLICY = f"default-src 'none'; style-src {digest(STYLE)}; script-src {_SOURCES}; img-src data:"
_HEADING = re.compile(r"<h2 id='([\w-]+)'>([^<]+)</h2>")

_CLOCK = "select step, sum(coalesce(seconds_step, 0)) over (order by step) from steps order by step"


def clock(con: duckdb.DuckDBPyConnection) -> Clock:
    """Return the clock of a run, which begins with step 0."""
    steps, seconds = zip((0, 0.0), *con.execute(_CLOCK).fetchall(), strict=True)
    return steps, seconds


def document(
    template: str, title: str, groups: Mapping[str, Sequence[Chart]], clocks: Sequence[Clock], **variables: Any
) -> Markup:
    """Return a report. `template` is its file in templates/report/, and `groups` are charts by their headings."""
    return render(
        f"report/{template}",
        title=title,
        groups={name: [chart.figure(clocks) for chart in charts] for name, charts in groups.items()},
        policy=_POLICY,
        scripts=list(map(Markup, _SCRIPTS)),
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
