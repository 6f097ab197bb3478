"""Thin shells over `views`: what a person can press. Each leaves a static rendering in the executed notebook."""
