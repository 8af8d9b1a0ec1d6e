"""`tba browse`: serves a run's log as pages on this machine. Pages only read, and are made anew for each request."""
