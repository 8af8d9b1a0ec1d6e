"""Check the NVIDIA GPUs, their driver and their free memory, and say what to do.

    python -m flows.driver_check [--cuda VERSION]

`make install-gpu` runs this module before it installs torch, and `make gpu-check` runs it too. It needs only Python
itself. The exit code is 1 if torch cannot use the GPUs with this driver. Without GPUs the exit code is 0, because the
image of a machine is often made elsewhere.
"""

import argparse
import sys

from tba.errors import RunFailed
from tba.runtime.nvidia import DEVICE_FILES, cuda_of_torch, fault, nvidia_devices, query_gpus


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuda", help="version of CUDA that torch is built for (default: the installed torch's)")
    options = parser.parse_args(arguments)
    try:
        devices = nvidia_devices()
    except RunFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if not devices and any(DEVICE_FILES.glob("nvidia[0-9]*")):
        print("error: there are NVIDIA GPUs here, but no nvidia-smi to ask about their driver", file=sys.stderr)
        return 1
    if not devices:
        print("there are no NVIDIA GPUs here that this process may use, so their driver was not checked")
        return 0
    for gpu in query_gpus():
        print(f"{gpu.name}, {gpu.uuid}: driver {gpu.driver}, {_gib(gpu.free)} of {_gib(gpu.total)} GiB are free")
        if gpu.is_taken:
            print("  another program uses its memory, as `nvidia-smi` shows: end it before a run starts")
    if why := fault(cuda := options.cuda or cuda_of_torch()):
        print(f"error: {why}", file=sys.stderr)
        return 1
    print(f"the driver suffices for CUDA {cuda}")
    return 0


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f}"


if __name__ == "__main__":
    sys.exit(main())
