"""The parts of `tools/gpu_acceptance.py`: `parts` and `runs` judge what `device`, `engine` and
`learner` measure in processes of their own.
"""
