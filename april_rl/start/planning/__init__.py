"""Plans a run from its settings and from facts about the machine and the model. Every `auto` is
decided here, and a run that does not fit is refused here.

`draft` needs no process; `plan` completes it with the memory of the workers' machines.
"""
