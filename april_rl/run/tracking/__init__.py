"""Progress, metrics.jsonl, W&B, plots; the only importer of wandb."""
