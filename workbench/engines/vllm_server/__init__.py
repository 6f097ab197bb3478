"""vLLM as a sampler in a process of its own."""
