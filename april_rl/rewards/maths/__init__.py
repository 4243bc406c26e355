"""When two written answers are mathematically equal: clean, tell the kind, compare by kind."""
