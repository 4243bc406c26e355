"""The FSDP2 model, its log-probabilities, optimizer and export."""
