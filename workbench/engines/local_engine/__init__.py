"""One Hugging Face causal model in this process: it samples, scores log-probs and learns."""
