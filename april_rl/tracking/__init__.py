"""Progress, metrics.jsonl, W&B; the only importer of wandb."""
