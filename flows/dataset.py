"""`tba export --query`: rows of a run as a dataset that others load: Parquet, and a card that says where it is from."""

import json
from pathlib import Path
from typing import Any

import duckdb

from flows import sql
from flows.export import appearing
from flows.progress import bar
from storage.run import Run
from storage.views import connect
from tba.errors import ConfigError

FILE = "data/train-00000-of-00001.parquet"

_ROWS = 65_536  # of a row group, and in memory at a time
_CARD = """\
---
configs:
- config_name: default
  data_files:
  - split: train
    path: {file}
tags:
- tba
---

# {name}

{rows:,} rows of the run `{run}`: task {task}, {policy}, made with TBA {code_version} and begun on {created}.

```sql
{query}
```

| column | type |
|---|---|
{columns}

Responses were sampled from versions of a policy in training, at temperature {temperature:g} and top-p {top_p:g} unless
the task asked otherwise. Rewards are the task's. Terms of use follow from those of its prompts and of the policy.
"""


def export(run: Run, query: str, folder: str) -> Path:
    """The folder appears only when all of it is there. ConfigError, in one line, for a query that has no rows."""
    with bar("copying what is new") as tell:
        con = connect(run, progress=tell)
    with sql.naming_errors(), sql.stopping(con), appearing(folder) as (target, unfinished):
        rows = sql.last(con, query)
        if rows is None:
            raise ConfigError("--query: the last statement has no rows")
        sql.check_names("--query", rows.columns)
        (unfinished / FILE).parent.mkdir()
        if not (count := _write(rows, unfinished / FILE)):
            raise ConfigError("--query: there are no such rows")
        (unfinished / "README.md").write_text(_card(run, query, rows, count, target.name))
    return target


def _write(rows: duckdb.DuckDBPyRelation, path: Path) -> int:
    import pyarrow.parquet as pq

    batches, count = rows.to_arrow_reader(_ROWS), 0
    with pq.ParquetWriter(path, batches.schema, compression="zstd") as file:
        for batch in batches:
            file.write_batch(batch, row_group_size=_ROWS)
            count += batch.num_rows
    return count


def _card(run: Run, query: str, rows: duckdb.DuckDBPyRelation, count: int, name: str) -> str:
    def setting(dotted: str) -> Any:
        section, _, field = dotted.partition(".")
        return run.config.get(section, {}).get(field)

    path = str(setting("model.path") or "")
    return _CARD.format(
        file=FILE, name=json.dumps(name)[1:-1], rows=count, run=run.name, task=setting("task.name"),
        policy=f"policy {path.rstrip('/').rpartition('/')[2]}" if path else "the policy that the task makes",
        code_version=run.code_version, created=run.created_at[:10], query=query.strip(),
        columns="\n".join(
            f"| {column} | {str(kind).lower()} |" for column, kind in zip(rows.columns, rows.types, strict=True)
        ),
        temperature=setting("search.temperature") or 1.0, top_p=setting("search.top_p") or 1.0,
    )  # fmt: skip
