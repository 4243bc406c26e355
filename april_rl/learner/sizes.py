"""Sizes of what the learner holds at a time. Free of torch, because the memory plan counts them."""

SHARD_BYTES = 2 * 2**30  # size of a file of an export, which rank 0 holds whole
# Bytes of one block of float32 logits. On CPU a block that fits in the cache is fastest, as long as
# it has enough rows for an efficient matrix product; an accelerator needs few, large kernels.
CPU_BLOCK_BYTES = 8 * 2**20
BLOCK_BYTES = 256 * 2**20
MIN_BLOCK_ROWS = 512
