"""The memory plan: whether a run fits GPUs and hosts, before anything is loaded."""
