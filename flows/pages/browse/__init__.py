"""`tba browse`: a run's log as pages on this machine, made anew for each request and only ever read."""
