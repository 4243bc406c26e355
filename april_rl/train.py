"""Entry point: `python -m april_rl.train +recipe=tiny_cpu key=value ...`."""

from __future__ import annotations

from april_rl.start.command_line import main

if __name__ == "__main__":
    main()
