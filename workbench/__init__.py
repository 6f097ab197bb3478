"""workbench: a Jupyter-first bench for RL post-training of language models."""
