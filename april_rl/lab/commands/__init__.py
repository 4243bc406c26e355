"""Command lines of the lab, one module each; `april_rl/start/commands` lists them."""
