"""Command lines of the lab, one module each; `april_rl/commands` lists them."""
