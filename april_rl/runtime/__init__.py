"""Controller to workers: Ray actors, placement, weight sync; the only place where learner and
engine meet.
"""
