"""Run a program that is not trusted."""
