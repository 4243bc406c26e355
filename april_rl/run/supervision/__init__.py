"""Detects workers that died, hang or have no memory left, and reports where they stopped."""
