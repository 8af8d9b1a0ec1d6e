"""Find the checkpoint from which a trainer continues: the newest intact one. Each damaged checkpoint that is passed
over becomes an event."""

from pathlib import Path

from storage.runs.attempts import Attempt
from storage.runs.events import Events
from storage.runs.held_lease import HeldLease
from storage.runs.run import Run
from storage.weights.attempt_claim import claim_attempt
from storage.weights.checkpoints import Checkpoints
from tba.config import Config
from tba.errors import Damaged
from tba.types import Version


def claim(run: Run, config: Config, lease: HeldLease, events: Events) -> tuple[Attempt, Path | None]:
    """Become the newest attempt. Return the attempt and the local folder of the checkpoint that it continues, or None
    if it starts from the beginning."""
    intact: dict[Version, Path] = {}

    def check(checkpoint: Version, folder: Path) -> None:
        _check(config, checkpoint, folder)
        intact[checkpoint] = folder

    def pass_over(checkpoint: Version, error: Damaged) -> None:
        message = f"checkpoint {checkpoint} is damaged, so the trainer looks for an older one: {error}"
        events.write("checkpoint-passed-over", message, severity="warning", checkpoint=str(checkpoint))
        lease.tell(f"checkpoint {checkpoint} is damaged, looking for an older one")

    attempt = claim_attempt(run, check=check, pass_over=pass_over)
    return attempt, intact[attempt.continues] if attempt.continues else None


def intact_folder(run: Run, config: Config, checkpoint: Version) -> Path:
    """Return a local folder with the files of a checkpoint. Raise Damaged if a trainer could not continue from them."""
    folder = Checkpoints(run).load(checkpoint.number, checkpoint.attempt)
    _check(config, checkpoint, folder)
    return folder


def _check(config: Config, checkpoint: Version, folder: Path) -> None:
    from tba.train.training_state import check_saved

    check_saved(folder, sync=checkpoint.number, step=config.step_of_sync(checkpoint.number))
