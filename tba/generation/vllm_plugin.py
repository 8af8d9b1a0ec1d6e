"""What vLLM runs in each of its processes, as its plugin `tba` (pyproject.toml). Where vLLM serves somebody else, a
name is registered and nothing more."""

import os
from multiprocessing import parent_process

from tba.runtime.child import end_with_parent

OURS = "TBA_ENGINE"
"""Set in the environment of the engines that roles start."""
FROM_FOLDER = "tba_folder"


def register() -> None:
    """Name our way of getting weights into an engine; and let an engine's processes end with the role that started
    them, which itself outlives its supervisor."""
    if os.environ.get(OURS) and (parent := parent_process()):
        end_with_parent()
        if not parent.is_alive():  # it ended before that
            os._exit(1)
    from vllm.distributed.weight_transfer.factory import (  # pyright: ignore[reportMissingImports]
        WeightTransferEngineFactory,
    )

    if FROM_FOLDER not in WeightTransferEngineFactory._registry:  # it may run more than once in a process
        WeightTransferEngineFactory.register_engine(FROM_FOLDER, "tba.generation.vllm_transfer", "FolderTransfer")
