"""The views and macros that queries can use, and what they return."""

import duckdb

VIEWS = (
    "alarms", "attempts", "checkpoints", "damage", "difficulty", "draws", "draws_all", "evaluations", "events",
    "examples", "groups", "prompts", "selection", "settings", "shards", "steps", "steps_all", "syncs", "trajectories",
    "versions",
)  # fmt: skip
MACROS = (
    "compare_selection()", "compare_versions()", "cost_per_solved()", "demonstrations()", "drift()", "duplicates()",
    "eligible_at(2)", "from_reference()", "group_of('0/0/0')", "help()", "learned_from(1)", "outdated()", "pass_at(2)",
    "preferences()", "prompts_by_set()", "reward_by_age()", "selection_by('length')", "stale(2)",
    "trajectory('0/0/0')", "unsolved()",
)  # fmt: skip


def rows(con: duckdb.DuckDBPyConnection, query: str) -> list:
    return con.execute(query).fetchall()


def columns(con: duckdb.DuckDBPyConnection, view: str) -> list[str]:
    return [row[0] for row in rows(con, f"describe from {view}")]
