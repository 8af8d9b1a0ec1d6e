"""The plugin `tba` (see pyproject.toml), which vLLM runs in each of its processes. In an engine that no role of ours
started, the plugin only registers a name."""

import os
from multiprocessing import parent_process

from tba.runtime.child import end_with_parent

OURS = "TBA_ENGINE"
"""Name of the environment variable that roles set for the engines they start: `cpu`, or `gpu`."""
FROM_FOLDER = "tba_folder"


def register() -> None:
    """Register `FolderTransfer`, which loads weights into an engine. In an engine of ours, also make this process end
    together with the role that started it; the role itself outlives its supervisor. On a CPU, also make the processes
    of the engine sleep while they wait for each other."""
    if os.environ.get(OURS) and (parent := parent_process()):
        end_with_parent()
        if not parent.is_alive():  # it ended before end_with_parent took effect
            os._exit(1)
    if os.environ.get(OURS) == "cpu":
        _sleep_while_waiting()
    from vllm.distributed.weight_transfer.factory import (  # pyright: ignore[reportMissingImports]
        WeightTransferEngineFactory,
    )

    if FROM_FOLDER not in WeightTransferEngineFactory._registry:  # vLLM may call register more than once in a process
        WeightTransferEngineFactory.register_engine(FROM_FOLDER, "tba.generation.vllm_transfer", "FolderTransfer")


def _sleep_while_waiting() -> None:
    """Make a process that waits for the next message of another one sleep after 5 milliseconds, not after a second.
    Steps on a CPU take long, and a process that asks for its message all the time takes a core that others need. vLLM
    does not wake the process for a message that follows another one within about a millisecond. The process therefore
    looks for messages every 20 milliseconds, not every 5 seconds."""
    from vllm.distributed.device_communicators import shm_broadcast  # pyright: ignore[reportMissingImports]

    shm_broadcast.SpinCondition.__init__.__defaults__ = (0.005,)  # seconds, of `busy_loop_s`
    shm_broadcast.SHM_READER_RECHECK_INTERVAL_MS = 20
