"""From settings to a running trainer, and the commands."""
