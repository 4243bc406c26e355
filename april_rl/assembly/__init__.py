"""From a checked configuration to the parts of a run, one file for each part."""
