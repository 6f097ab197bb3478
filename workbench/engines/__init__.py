"""Engines: what does the heavy work behind a stage. Protocols first, then one file per kind."""

from workbench.engines.chat import ClassifyEndpoint, OpenAIChat, SamplerChat
from workbench.engines.classifier import LocalClassifier, classifier
from workbench.engines.local_engine import LocalEngine, local
from workbench.engines.local_settings import LocalSettings
from workbench.engines.protocol import (
    ChatModel,
    Classified,
    Classifier,
    Completion,
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

chat = SamplerChat
openai = OpenAIChat
classify = ClassifyEndpoint

__all__ = [
    "ChatModel",
    "Classified",
    "Classifier",
    "ClassifyEndpoint",
    "Completion",
    "Learned",
    "Learner",
    "LocalClassifier",
    "LocalEngine",
    "LocalSettings",
    "LogProbModel",
    "Loss",
    "LossOutput",
    "Normalisers",
    "OpenAIChat",
    "Request",
    "Sample",
    "Sampler",
    "SamplerChat",
    "SamplingSettings",
    "chat",
    "classifier",
    "classify",
    "local",
    "openai",
]
