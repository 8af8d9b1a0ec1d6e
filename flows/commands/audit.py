"""`tba audit`: repeat a past step from what is stored, and compare the result with the ledger.

The audit starts from the newest intact checkpoint before the step, or from the policy before training, and repeats the
steps in between. It also repeats the steps after the audited one, up to the sync that closes the audited step: the
ledger of that sync holds a checksum of the resulting weights.
"""

import argparse
import json
import logging
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from flows.commands.arguments import RUN_HELP, explain, open_run
from flows.progress import bar
from flows.roles.threads import use_threads
from storage import layout
from storage.log.ledger import LATER, Entry, read_entries
from storage.runs.arithmetic import Arithmetic, find_arithmetic
from storage.runs.attempts import chain
from storage.runs.run import Run
from tba.config import Config, parse
from tba.errors import ConfigError, Damaged, Missing
from tba.types import Version

if TYPE_CHECKING:
    from flows.roles.repeat_steps import RepeatedStep

log = logging.getLogger(__name__)

OFF_CPU = 0.01
"""Default of the accepted relative difference where arithmetic is not repeatable bit by bit."""

_OF_A_ROW = (
    "slot", "position", "trajectory_id", "prompt_id", "branch", "weight", "age", "advantage", "residual", "log_z",
    "logp", "ref_logp",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    explain(
        parser,
        "Starts from the nearest checkpoint before the step and takes the steps since then again. The batch, the\n"
        "loss, the gradient norm and the values of each row are compared with the ledger, and the resulting\n"
        "weights with the checksum of the next sync. On a CPU all are equal bit by bit, if the number format and the\n"
        "number of threads are those of the attempt that took the step; otherwise the audit says what differs. Exits\n"
        "with 0 if all agree and with 1 if something differs.",
        "example:\n  tba audit first --step 300",
    )
    parser.add_argument("run", metavar="RUN", help=RUN_HELP)
    parser.add_argument("--step", type=int, required=True, metavar="N", help="the step to repeat")
    parser.add_argument(
        "--tolerance",
        type=float,
        metavar="X",
        help="accepted relative difference (default: 0 on a CPU, 0.01 on other devices)",
    )
    parser.add_argument("--json", action="store_true", help="the comparison as one object instead of a table")


def command(options: argparse.Namespace) -> int:
    run = open_run(options.run)
    return show(run, options.step, tolerance=options.tolerance, as_json=options.json)


@dataclass(frozen=True)
class Compared:
    """One value from the ledger, and the same value from the repeated step."""

    what: str
    ledger: Any
    now: Any
    agrees: bool


@dataclass
class Audit:
    run: str
    step: int
    attempt: int
    sync: int
    began_after: int  # the step whose stored state the audit started from
    device: str
    tolerance: float
    computed: Arithmetic | None  # how the attempt computed; None if this is not stored
    computing: Arithmetic  # how the audit computes
    compared: list[Compared] = field(default_factory=list)  # the values of the whole step, equal or not
    rows: list[Compared] = field(default_factory=list)  # values of the rows of the batch that differ
    batch: int = 0

    @property
    def ok(self) -> bool:
        return all(it.agrees for it in [*self.compared, *self.rows])


def show(run: Run, step: int, *, tolerance: float | None, as_json: bool) -> int:
    found = audit(run, step, tolerance=tolerance)
    if as_json:
        print(json.dumps({"ok": found.ok, **asdict(found)}, indent=1))
    else:
        _print(found)
    return 0 if found.ok else 1


def audit(run: Run, step: int, *, tolerance: float | None = None) -> Audit:
    """Repeat a step and compare it with the ledger. Raise ConfigError if the step is not one of this run's own, or if
    its ledger is not stored yet."""
    config = parse(run.config)
    attempt = _attempt_of(run, config, step)
    sync = config.sync_of_step(step)
    entries = _entries(run, sync, attempt)
    use_threads(config)
    from flows.roles.repeat_steps import restore_trainer

    trainer, last = restore_trainer(run, step), config.step_of_sync(sync)
    accepted = tolerance if tolerance is not None else 0.0 if trainer.repeatable else OFF_CPU
    arithmetic = find_arithmetic(run, attempt), trainer.arithmetic
    found = Audit(run.name, step, attempt, sync, trainer.step, trainer.device, accepted, *arithmetic)
    log.info("repeating steps %d to %d of %s", trainer.step + 1, last, run.name)
    with bar("repeating steps") as tell:
        for repeated in trainer.repeat_until(last):
            tell(repeated.step - found.began_after, last - found.began_after)
            if repeated.step == step:
                entry = entries[step - last - 1]
                written = Version(entry.step["version"], entry.step["version_attempt"])
                began_with = Version(config.sync_before(step), attempt)
                found.compared.append(Compared("version", str(written), str(began_with), written == began_with))
                _compare_step(found, entry, repeated)
    written = entries[-1].step["weights_sha256"]
    now = trainer.weights_sha256(like=written)
    agrees = written == now or accepted > 0  # a checksum says nothing where bits are not repeatable
    found.compared.append(Compared(f"sha256 of the weights after step {last}", written, now, agrees))
    return found


def _attempt_of(run: Run, config: Config, step: int) -> int:
    """Return the attempt whose ledger counts for a step."""
    if run.parent and step <= run.parent.step:
        raise ConfigError(
            f"--step: {run.name} is a fork that goes on after step {run.parent.step}; step {step} is one of "
            f"{run.parent.run}'s: `tba audit {run.parent.run} --step {step}`"
        )
    if not 1 <= step <= config.training.steps:
        raise ConfigError(f"--step: must be between {config.start.step + 1} and {config.training.steps}, got {step}")
    sync = config.sync_of_step(step)
    return next((span.attempt for span in chain(run) if span.covers(sync)), 0)


def _entries(run: Run, sync: int, attempt: int) -> list[Entry]:
    try:
        return read_entries(run, sync, attempt)
    except Missing as error:
        if any(run.store.exists(name(sync, attempt)) for name in (layout.steps, layout.draws)):
            raise Damaged(str(error)) from None
        raise ConfigError(f"--step: the ledger of sync {sync}, which closes this step, is not stored yet") from None


def _compare_step(found: Audit, entry: Entry, repeated: "RepeatedStep") -> None:
    outcomes = zip(repeated.draws, repeated.learned.outcomes, strict=True)
    drawn = [{**asdict(draw), **asdict(outcome)} for draw, outcome in outcomes]
    found.batch = len(drawn)
    same = sum(now["trajectory_id"] == said["trajectory_id"] for now, said in zip(drawn, entry.draws, strict=False))
    found.compared.append(
        Compared("trajectories drawn", len(entry.draws), same, same == len(entry.draws) == len(drawn))
    )
    scales = {name: _scale(row[name] for row in entry.draws) for name in _OF_A_ROW}
    for now, said in zip(drawn, entry.draws, strict=False):
        place = f"slot {said['slot']}, position {said['position']}"
        names = [name for name in _OF_A_ROW if said[name] is not None or name not in LATER]
        values = [_compare(found, f"{place}: {name}", said[name], now[name], scales[name]) for name in names]
        found.rows += [it for it in values if not it.agrees]
    stored, now = (float(metrics.get("skipped") or 0) for metrics in (entry.step, repeated.metrics))
    found.compared.append(Compared("skipped", stored, now, stored == now))
    for name, value in sorted(repeated.metrics.items()):
        if name in entry.step and name != "skipped":  # the ledger lacks metrics that were not measured then
            said = entry.step[name]
            found.compared.append(_compare(found, name, said, value, _scale([said])))


def _scale(values: Iterable[Any]) -> float:
    """Return the largest absolute value of the numbers; differences are measured relative to it."""
    return max((abs(value) for value in values if isinstance(value, float)), default=0.0)


def _compare(found: Audit, what: str, ledger: Any, now: Any, scale: float) -> Compared:
    if isinstance(ledger, float) and isinstance(now, float):
        return Compared(what, ledger, now, ledger == now or abs(ledger - now) <= found.tolerance * scale)
    return Compared(what, ledger, now, ledger == now)


# --- on the screen --------------------------------------------------------------------------------------------------

_SHOWN = 20  # differing values that are shown; the rest is only counted


def _print(found: Audit) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    console.print(
        f"step {found.step} of {found.run}, taken by attempt {found.attempt}; taken again on {found.device} from the "
        f"state after step {found.began_after}",
        soft_wrap=True,
    )
    if str(found.computed) != str(found.computing):  # on a GPU, the number of threads does not matter
        console.print(_say_arithmetic(found), soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("compared", "ledger", "taken again", ""):
        table.add_column(name)
    for it in [*found.compared, *found.rows[:_SHOWN]]:
        table.add_row(it.what, _short(it.ledger), _short(it.now), _verdict(found, it))
    console.print(table)
    if len(found.rows) > _SHOWN:
        console.print(f"… and {len(found.rows) - _SHOWN} more values of the batch that differ")
    if found.ok:
        console.print(f"the step matches the ledger: {found.batch} rows and all values found for them agree")
    else:
        number = sum(not it.agrees for it in [*found.compared, *found.rows])
        console.print(f"{number} value{'s differ' if number != 1 else ' differs'} from the ledger")


def _say_arithmetic(found: Audit) -> str:
    if found.computed is None:
        return f"how attempt {found.attempt} computed is not stored; the audit computes in {found.computing}"
    return (
        f"the audit does not compute as attempt {found.attempt} did, so values can differ: it computes in "
        f"{found.computing}; the attempt computed in {found.computed}"
    )


def _verdict(found: Audit, it: Compared) -> str:
    if it.ledger == it.now:
        return "the same"
    if not it.agrees:
        return "[red]differs[/red]"
    return f"within {found.tolerance:g}" if isinstance(it.now, float) else "not compared"


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.9g}"
    return f"{value[:12]}…" if isinstance(value, str) and len(value) > 40 else str(value)
