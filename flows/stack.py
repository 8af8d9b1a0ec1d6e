"""`python -m flows.stack`: a Prefect server with workers for as long as a command runs."""

import sys

from flows.orchestration.local_server import main

if __name__ == "__main__":
    sys.exit(main())
