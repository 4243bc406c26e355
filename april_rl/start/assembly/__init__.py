"""Turn a checked configuration into the parts of a run, with one file for each part."""
