"""Engines: what does the heavy work behind a stage. Protocols first, then one file per kind."""

from workbench.engines.local_engine import LocalEngine, local
from workbench.engines.local_settings import LocalSettings
from workbench.engines.protocol import (
    Learned,
    Learner,
    LogProbModel,
    Loss,
    LossOutput,
    Normalisers,
    Request,
    Sample,
    Sampler,
    SamplingSettings,
)

__all__ = [
    "Learned",
    "Learner",
    "LocalEngine",
    "LocalSettings",
    "LogProbModel",
    "Loss",
    "LossOutput",
    "Normalisers",
    "Request",
    "Sample",
    "Sampler",
    "SamplingSettings",
    "local",
]
