"""Dashboards of W&B as code: which panels show which metrics."""
