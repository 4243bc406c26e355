"""Sampler, kernels and fixes that vLLM needs on a CPU."""
