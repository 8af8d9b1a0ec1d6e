"""Code that the commands share: exit codes, help texts, and arguments that several commands take."""

import argparse
from typing import TYPE_CHECKING, Any

from tba.errors import ConfigError, Missing

if TYPE_CHECKING:
    from storage.runs.run import Run

DONE, FOUND_WRONG, BAD_USAGE, INTERRUPTED = 0, 1, 2, 130

RUN_HELP = (
    "a run: its name under the default root ($TBA_ROOT, else tba-runs/), a path with a '/' in it, or an s3:// URL"
)


class CommandParser(argparse.ArgumentParser):
    """A parser that accepts positional arguments before, between and after options."""

    _is_inside = False

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]  # overloaded there
        self, args: Any = None, namespace: Any = None
    ) -> Any:
        if self._is_inside:  # the call below calls this method twice: for options, then for the rest
            return super().parse_known_args(args, namespace)
        self._is_inside = True
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self._is_inside = False


class Help(argparse.RawDescriptionHelpFormatter):
    """A help formatter that keeps texts as they are written and leaves room for the names of options."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=32)


def explain(parser: argparse.ArgumentParser, *about: str) -> None:
    """Add paragraphs to the help of a command, after its summary. The last text holds examples and ends the help."""
    parser.description = "\n\n".join([parser.description or "", *about[:-1]])
    parser.epilog = about[-1]


def add_set(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        nargs="+",
        default=[],
        dest="changes",
        help="change a setting by its name, such as sampling.recent_share=0.9; can be repeated",
    )


def add_gpus(parser: argparse.ArgumentParser, what: str) -> None:
    """Add the option --gpus. `what` says what the command does so that the run fits."""
    parser.add_argument(
        "--gpus",
        metavar="GPUS",
        help=f"GPUs for the run, such as 1x24 or 8x80 (number and GiB of each), or those found `here`: {what}",
    )


def add_external_trainer(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--external-trainer",
        action="store_true",
        help="do not start the trainer: something else starts it, such as torchrun, Slurm or Kubernetes",
    )


def read_changes(options: argparse.Namespace) -> dict[str, Any]:
    return dict(_change(text) for texts in options.changes for text in texts)


def _change(text: str) -> tuple[str, Any]:
    """Split KEY=VALUE. Read a list, an object or null as JSON. Leave any other value as text, which the settings then
    convert to the type that they expect."""
    key, separator, value = text.partition("=")
    if not (key and separator):
        raise ConfigError(f"--set: KEY=VALUE, such as training.steps=100, got {text!r}")
    if value == "null" or value.startswith(("[", "{")):
        from storage.objects import strict_json

        try:
            return key, strict_json.loads(value)
        except strict_json.DoubledKey as error:
            raise ConfigError(f"--set: {key}: {error}, got {value!r:.200}") from None
        except ValueError:
            return key, value
    return key, value


def parse_seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"a number of seconds, got {text!r}") from None
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"between 0.1 and 3600 seconds, got {text}")
    return seconds


def open_run(name: str) -> "Run":
    """Open the run that a person named. A run that does not exist is bad usage, not a fault of storage: raise
    ConfigError."""
    from storage.runs.run import Run, resolve

    try:
        return Run.open(resolve(name))
    except Missing as error:
        raise ConfigError(str(error)) from None
