"""Controller to workers: Ray actors, placement, weight sync; the only place where learner and
engine meet.
"""

import os

# Ray reads it when it is imported. What it prints of a dead process are guesses, and pages of its
# own log: the watchdog says who died, and of what.
os.environ.setdefault(
    "RAY_DEDUP_LOGS_SKIP_REGEX",
    "^(A worker died or was killed while executing|Raylet is terminated)",
)
