"""A certificate of numerics: transformers, learner and engine compute the same model."""
