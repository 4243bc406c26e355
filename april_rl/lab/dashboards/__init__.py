"""W&B dashboards as code: which panels show which metrics."""
