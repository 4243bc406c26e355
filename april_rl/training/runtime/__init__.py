"""Workers as Ray actors: placement and weight sync. Only here learner and engine meet."""

import logging
import os

# Ray reads this when it is imported. For a dead process it prints guesses and pages of its own log;
# the watchdog says which process died, and why.
os.environ.setdefault(
    "RAY_DEDUP_LOGS_SKIP_REGEX",
    "^(A worker died or was killed while executing|Raylet is terminated)",
)
# In a notebook Ray asks for a package that draws its tables, but a run shows none of them.
logging.getLogger("ray.widgets").setLevel(logging.WARNING)
