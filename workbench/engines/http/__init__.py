"""Engines behind HTTP: samplers, chat models and reward models that run on a server."""
