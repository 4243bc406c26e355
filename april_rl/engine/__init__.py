"""The Engine protocol on vLLM; the only importer of vllm."""
