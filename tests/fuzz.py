"""Coverage-guided fuzzing of the readers of stored bytes, for as long as you like: `make fuzz`.

`tests/storage/maintenance/test_fuzz.py` damages stored bytes at random; here, atheris looks for bytes that reach new
code. Each kind of object has its own process, which starts with a real object of that kind. A reader may raise only our
errors, with a message. Any other exception ends the process, and the bytes that caused it are kept.
"""

import argparse
import logging
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

DEADLINE = 20  # seconds for one input, so that a reader that hangs is found


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=int, default=60, help="seconds for each kind of object")
    parser.add_argument("--kind", help="fuzz only this kind, in this process")
    options = parser.parse_args()
    if options.kind:
        fuzz(options.kind, options.seconds)
    from tests.support.faults.readers import READERS

    failed: list[str] = []
    for kind in sorted(READERS):
        began = time.monotonic()
        command = [sys.executable, "-m", "tests.fuzz", "--kind", kind, "--seconds", str(options.seconds)]
        found = subprocess.run(command, capture_output=True, text=True, errors="replace")
        said = [line for line in found.stderr.splitlines() if line.startswith("Done ")]
        print(f"{kind:14} {said[-1] if said else 'FAILED'} ({time.monotonic() - began:.0f} s)", flush=True)
        if found.returncode:
            failed.append(kind)
            print("\n".join((found.stdout + found.stderr).splitlines()[-40:]))
    return 1 if failed else 0


def fuzz(kind: str, seconds: int) -> None:
    """Fuzz the reader of a kind of object. Never returns: libFuzzer ends the process."""
    import atheris

    with atheris.instrument_imports(include=["storage", "tba"]):
        from tests.support.faults.readers import READERS, make_whole_run
    from tba.errors import TBAError

    logging.disable()
    folder = Path(tempfile.mkdtemp(prefix="tba-fuzz-"))
    os.environ["TBA_CACHE"] = str(folder / "cache")
    run = make_whole_run(folder)
    path = next(path for path in sorted(Path(run.url).rglob("*")) if path.is_file() and f"/{kind}" in str(path))
    corpus = folder / "corpus"
    corpus.mkdir()
    (corpus / "whole").write_bytes(path.read_bytes())

    def try_bytes(data: bytes) -> None:
        path.write_bytes(data)
        try:
            READERS[kind](run)
        except TBAError as error:
            assert str(error)

    limits = [f"-max_total_time={seconds}", f"-timeout={DEADLINE}", "-rss_limit_mb=4096", "-print_final_stats=1"]
    atheris.Setup([sys.argv[0], *limits, f"-artifact_prefix={folder}/", str(corpus)], try_bytes)
    atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main())
