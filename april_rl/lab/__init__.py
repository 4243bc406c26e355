"""The lab predicts, rehearses, compares and draws; training works without it.

The core, which trains, never imports the lab: `rollout.over_sampling_factor=auto` is found by
name, like a reward, and the command line `april_rl/train.py` writes the report at the end of a
run.
"""
