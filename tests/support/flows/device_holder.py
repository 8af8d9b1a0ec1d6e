"""Processes that take devices as roles do."""

import subprocess
import sys
from collections.abc import Callable

from flows.supervision.gpus import Devices

HOLD = "import time; print('held', flush=True); time.sleep(60)"


class Holder:
    """A process that takes devices as a role does."""

    def __init__(self, devices: Devices, kind: str):
        held = devices.acquire(kind)
        assert held is not None
        self.uuids = "".join(held.uuids)
        self.process = subprocess.Popen([sys.executable, "-c", HOLD], pass_fds=held.locks, stdout=subprocess.PIPE)
        held.release()
        assert self.process.stdout is not None
        self.process.stdout.readline()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        if self.process.stdout:
            self.process.stdout.close()


Hold = Callable[..., Holder]
