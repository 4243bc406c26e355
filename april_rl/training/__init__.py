"""Training: samples are rolled out, packed and learned, and the weights are synced."""
