"""Chooses the prompts of a run by a condition on the log of an earlier run.

The condition is SQL over the view `difficulty` of the earlier run. The query runs in the same sandbox as `tba sql`. Two
prompts are the same if both id and text are equal: in other data the same id may stand for another problem, or for the
same problem in other words.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import duckdb

from storage import layout
from storage.queries.mirror import Progress
from storage.queries.views import connect
from storage.runs.run import Run, resolve
from tba.errors import ConfigError, Damaged, Missing, StorageError
from tba.types import Prompt

log = logging.getLogger(__name__)

Name = tuple[str, str]  # prompt_id and text


@dataclass(frozen=True)
class Known:
    """The training prompts of an earlier run, and those of them for which the condition holds."""

    url: str
    where: str
    prompts: frozenset[Name] = field(repr=False)
    chosen: frozenset[Name] = field(repr=False)

    def choose(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Return, in their order, the prompts for which the condition holds. A prompt that the earlier run does not
        have is never chosen."""
        return [prompt for prompt in prompts if _name(prompt) in self.chosen]

    def unknown(self, prompts: Sequence[Prompt]) -> int:
        return sum(_name(prompt) not in self.prompts for prompt in prompts)

    def tell(self, prompts: Sequence[Prompt]) -> str:
        unknown = self.unknown(prompts)
        without = f"; {unknown:,} are left out that {self.url} does not have, by id and text" if unknown else ""
        return (
            f"search.prompts_where: {self.where!r} holds in {self.url} for {len(self.chosen):,} of "
            f"{len(self.prompts):,} prompts: {len(self.choose(prompts)):,} of {len(prompts):,} here{without}"
        )


def ask(name: str, where: str, *, needed: int, progress: Progress | None = None) -> Known:
    """Read an earlier run, given by name, path or URL. Return its prompts, and those for which the condition `where`
    holds. Raise ConfigError, which names the setting at fault, if the run or the condition cannot be used, or if the
    condition holds for fewer prompts than `needed`."""
    with _naming("search.prompts_from"):
        run = Run.open(resolve(name))
        con = connect(run, progress=progress)
    with con:
        for key, problem in con.execute("from damage").fetchall():
            if key == layout.prompts("train"):
                raise ConfigError(f"search.prompts_from: {run.url}/{key} {problem}")
            log.warning("search.prompts_from: %s/%s %s and is left out", run.url, key, problem)
        rows = con.view("difficulty")
        with _naming("search.prompts_from"):
            known = rows.project("prompt_id, text").fetchall()
        with _naming(f"search.prompts_where: {where!r}"):
            chosen = rows.filter(where).project("prompt_id, text").fetchall()
    if len(chosen) < needed:
        raise ConfigError(
            f"search.prompts_where: {where!r} holds for {len(chosen)} of the {len(known)} prompts of {run.url}, and "
            f"a round asks {needed} (search.prompts_per_round)"
        )
    return Known(run.url, where, frozenset(known), frozenset(chosen))


def _name(prompt: Prompt) -> Name:
    return prompt.prompt_id, prompt.text


@contextmanager
def _naming(setting: str) -> Iterator[None]:
    """Convert errors of the block into a ConfigError that names the setting at fault. If the store cannot be reached,
    that is not the fault of a setting: the error stays a StorageError."""
    try:
        yield
    except (ConfigError, Missing, Damaged) as error:
        raise ConfigError(f"{setting}: {error}") from None
    except StorageError as error:
        raise StorageError(f"{setting}: {error}") from error
    except duckdb.Error as error:
        said = str(error).split("\n\nLINE ")[0]
        raise ConfigError(f"{setting}: {' '.join(said.split())}") from None
