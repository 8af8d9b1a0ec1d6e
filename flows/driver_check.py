"""Check the NVIDIA GPUs, their driver and their free memory, and say what to do.

    python -m flows.driver_check [--cuda VERSION]

`make install-gpu` runs this module before it installs torch, and `make gpu-check` runs it too. It needs only Python
itself. The exit code is 1 if torch cannot use the GPUs, for their driver or their age. Without GPUs the exit code is 0,
because the image of a machine is often made elsewhere.
"""

import argparse
import sys
from collections.abc import Mapping

from tba.errors import RunFailed
from tba.runtime.nvidia import (
    BFLOAT16,
    DEVICE_FILES,
    LEAST_CAPABILITIES,
    cuda_of_torch,
    fault,
    is_below,
    nvidia_devices,
    query_capabilities,
    query_gpus,
)


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
    capabilities = query_capabilities()
    for gpu in query_gpus():
        capability = capabilities.get(gpu.uuid, "unknown")
        print(
            f"{gpu.name}, {gpu.uuid}: driver {gpu.driver}, compute capability {capability}, {_gib(gpu.free)} of "
            f"{_gib(gpu.total)} GiB are free"
        )
        if gpu.is_taken:
            print("  another program uses its memory, as `nvidia-smi` shows: end it before a run starts")
        if is_below(capability, BFLOAT16):
            print(f"  it does not multiply bfloat16, which vLLM needs for model.publish_dtype=bfloat16 ({BFLOAT16})")
    cuda = options.cuda or cuda_of_torch()
    if why := fault(cuda) or _too_old(cuda, {uuid: capabilities.get(uuid, "") for uuid in devices}):
        print(f"error: {why}", file=sys.stderr)
        return 1
    print(f"the driver suffices for CUDA {cuda}")
    return 0


def _too_old(cuda: str | None, capabilities: Mapping[str, str]) -> str:
    """Return which of these GPUs are too old for a torch that is built for this version of CUDA, and what to do. Return
    an empty text if none is known to be."""
    least = LEAST_CAPABILITIES.get(int((cuda or "0").partition(".")[0]), "")
    names = {gpu.uuid: gpu.name for gpu in query_gpus()}
    old = [f"{names.get(uuid, uuid)} ({it})" for uuid, it in capabilities.items() if is_below(it, least)]
    if not old:
        return ""
    return (
        f"a torch that is built for CUDA {cuda} needs GPUs of compute capability {least} or higher, got "
        f"{', '.join(old)}: hide them with CUDA_VISIBLE_DEVICES, or use other GPUs"
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f}"


if __name__ == "__main__":
    sys.exit(main())
