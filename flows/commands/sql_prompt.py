"""`tba sql` without a query: a prompt with completion and a history."""

import os
import re
import sys
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from rich.markup import escape

from flows.progress import bar
from flows.queries import query_process, statements
from flows.queries.damage_report import culprits, damage_by, warn_of
from flows.queries.query_process import QueryProcess
from flows.queries.row_values import decode_row
from storage.local_files.shared_cache import cache_folder
from storage.runs.run import Run
from tba.errors import ConfigError, TBAError

try:
    import readline
except ImportError:  # Python was built without it: no completion and no history
    readline = None

_GREETING = """\
{url}
A query may take several lines and ends with ';'. Tab completes, Ctrl-C forgets a line or stops a query, Ctrl-D leaves.
.help lists views and macros, .help NAME explains one, .refresh looks at the run again."""
_COMMANDS = ("exit", "help", "quit", "refresh")
_LINES_KEPT = 1000  # lines of the history

_NAMES = r"""
select regexp_replace(name, '\(.*', '(') from help()
union select column_name from duckdb_columns() where not internal
union select function_name || '(' from duckdb_functions()
  where function_type <> 'table_macro' and regexp_matches(function_name, '^[a-z]\w+$')
union select keyword_name from duckdb_keywords()
"""


def prompt(run: Run) -> int:
    """Read and answer queries until the person leaves. All queries see the run as it was when the prompt began or was
    last refreshed, so their answers fit each other. What one query creates, such as a temporary table, can be used by
    later queries."""
    with closing(QueryProcess(run.url)) as queries:
        asking = _Asking(run, queries)
        print(_GREETING.format(url=run.url))
        history = _History(cache_folder("prompt") / "history")
        while True:
            try:
                query = _ask(history)
                if query is None:
                    return 0
                asking.answer(query)
            except TBAError as error:
                gone = statements.is_gone(error)
                said = f"{statements.GONE}, with .refresh" if gone else f"{error}{culprits(run, error)}"
                print(f"error: {said}{asking.lost()}", file=sys.stderr)
            except KeyboardInterrupt:
                print(f"interrupted{asking.lost()}", file=sys.stderr)


class _Asking:
    def __init__(self, run: Run, queries: QueryProcess):
        self.run, self.queries = run, queries
        with bar("copying what is new") as tell:
            queries.start(tell)
        self._look()

    def lost(self) -> str:
        """Return what to add to a message if the query ended its process; empty if the process still runs."""
        if self.queries.is_running:
            return ""
        return "\nwhat earlier queries made is gone with the query's process; the next one looks at the run again"

    def refresh(self) -> None:
        with bar("copying what is new") as tell:
            self.queries.refresh(tell)
        self._look()

    def _look(self) -> None:
        warn_of(self.run, damage_by(self.queries))
        if readline:
            _complete_with(Completer([name for (name,) in self._rows(_NAMES)]))

    def answer(self, query: str) -> None:
        if query.startswith("."):
            command, _, about = query[1:].rstrip("; ").partition(" ")
            self.obey(command, about.strip())
        else:
            query_process.print_answer(self.queries, query, "table")

    def obey(self, command: str, about: str) -> None:
        if command == "refresh":
            self.refresh()
            print("{} steps, {} trajectories".format(*self._sizes()))
        elif command == "help":
            _explain(self._rows("from help(?)", about or None))
        else:
            raise ConfigError(f".{command} is no command: {', '.join(f'.{it}' for it in _COMMANDS)}")

    def _sizes(self) -> tuple[int, int]:
        [sizes] = self._rows("select (select count(*) from steps), (select sum(rows) from shards)")
        return sizes[0], sizes[1] or 0

    def _rows(self, query: str, *parameters: str | None) -> list[tuple[Any, ...]]:
        _, rows = self.queries.ask("rows", query=query, parameters=parameters)
        return list(map(decode_row, rows))


def _ask(history: "_History") -> str | None:
    """Return the next query, which may have several lines, or None if the person leaves. Ctrl-C discards the lines
    typed so far."""
    lines: list[str] = []
    while True:
        try:
            line = input("tba> " if not lines else "...> ")
        except EOFError:
            print()
            return None
        except KeyboardInterrupt:
            print()
            lines = []
            continue
        if not lines and line.strip().lower().rstrip(";") in ("exit", "quit", ".exit", ".quit", r"\q"):
            return None
        if line.strip():
            lines.append(line)
        if lines and (line.rstrip().endswith(";") or lines[0].startswith(".")):
            history.add(lines)
            return "\n".join(lines)


def _explain(rows: Sequence[tuple[str, str, str]]) -> None:
    """Print the rows of `help` as a table with room for whole sentences."""
    from rich.console import Console
    from rich.table import Table

    table = Table("name", "type", "meaning", box=None, pad_edge=False)
    for row in rows:
        table.add_row(*map(escape, row))
    Console(highlight=False).print(table)


class Completer:
    """Completes a word to a name of the run or a word of SQL, or to a command after a dot at the start of a line."""

    def __init__(self, names: Sequence[str]):
        self.names = sorted(names)

    def candidates(self, line: str, word: str) -> list[str]:
        if re.fullmatch(r"\.\w*", line):
            return [name for name in _COMMANDS if name.startswith(word)]
        found = [name for name in self.names if name.startswith(word.lower())]
        if line.startswith(".help"):
            return [name.rstrip("(") for name in found]
        return [name.upper() for name in found] if len(word) > 1 and word.isupper() else found


def _complete_with(completer: Completer) -> None:
    assert readline is not None
    typed, end = readline.get_line_buffer, readline.get_endidx

    def complete(word: str, state: int) -> str | None:
        found = completer.candidates(typed()[: end()], word) if word else []
        return found[state] if state < len(found) else None

    readline.set_completer(complete)
    readline.set_completer_delims(" \t\n.,;:()[]{}=<>!+-*/%|'\"")
    readline.parse_and_bind("bind ^I rl_complete" if "libedit" in (readline.__doc__ or "") else "tab: complete")


class _History:
    """The history of queries, including those of earlier sessions of `tba sql`. It stays empty if Python has no
    `readline`."""

    def __init__(self, path: Path):
        self.path = path
        if readline:
            readline.set_history_length(_LINES_KEPT)
            with suppress(OSError):
                readline.read_history_file(path)

    def add(self, lines: Sequence[str]) -> None:
        """Save a query to the history file. Join its lines into one entry, unless one of them has a comment: a comment
        would swallow what follows."""
        if not readline:
            return
        length = readline.get_current_history_length()
        typed = [readline.get_history_item(length - len(lines) + n + 1) for n in range(len(lines))]
        if len(lines) > 1 and typed == list(lines) and not any("--" in line for line in lines):
            for _ in lines:
                length -= 1
                readline.remove_history_item(length)
            readline.add_history(" ".join(line.strip() for line in lines))
        with suppress(OSError):
            readline.write_history_file(self.path)
            os.chmod(self.path, 0o600)
