"""The settings of runs of different versions of this program, in a form in which they can be compared."""

from storage.queries.tables import by_name, flattened
from storage.runs.run import Run
from tba.config import parse_known
from tba.errors import ConfigError


def comparable_settings(run: Run) -> dict[str, str]:
    """Return the settings of a run by their dotted names, as this version reads them. If this version cannot read them,
    return them as they are stored."""
    try:
        return dict(flattened(parse_known(run.config).to_dict()))
    except ConfigError:
        return dict(by_name(run))
