"""The parts of `tools/models_table.py`: tiny models, the check in vLLM, the page."""
