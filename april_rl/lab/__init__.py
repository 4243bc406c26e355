"""The lab predicts, rehearses, compares and draws; training works without it.

The core, which trains, never imports the lab; the command line writes the report at the end of a
run.
"""
