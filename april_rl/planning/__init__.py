"""Plans a run from its settings and from facts of machine and model: every `auto` ends here, and
what does not fit is refused here.

`draft` needs no process; `plan` completes it with the memory of the workers' machines.
"""
