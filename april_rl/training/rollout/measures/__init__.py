"""Measures of a finished step; nothing here decides what is sampled or trained."""
