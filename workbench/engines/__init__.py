"""Engines: what does the heavy work behind a stage. Protocols first, then one file per kind."""

from workbench.engines.chat import ClassifyEndpoint, OpenAIChat, SamplerChat
from workbench.engines.classifier import LocalClassifier, classifier
from workbench.engines.fsdp import FsdpEngine, fsdp
from workbench.engines.fsdp_group import Group, local_group
from workbench.engines.fsdp_settings import FsdpSettings
from workbench.engines.local_engine import LocalEngine, local
from workbench.engines.local_settings import LocalSettings
from workbench.engines.paired import Paired, paired
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
from workbench.engines.remote import RemoteSampler, remote
from workbench.engines.remote_settings import RemoteSettings
from workbench.engines.server_command import ServerCommand, server_command
from workbench.engines.sharded_files import export
from workbench.engines.vllm import VllmEngine, vllm
from workbench.engines.vllm_classifier import VllmClassifier, vllm_classifier
from workbench.engines.vllm_served import VllmSettings

chat = SamplerChat
openai = OpenAIChat
classify = ClassifyEndpoint

__all__ = [
    "ChatModel",
    "Classified",
    "Classifier",
    "ClassifyEndpoint",
    "Completion",
    "FsdpEngine",
    "FsdpSettings",
    "Group",
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
    "Paired",
    "RemoteSampler",
    "RemoteSettings",
    "Request",
    "Sample",
    "Sampler",
    "SamplerChat",
    "SamplingSettings",
    "ServerCommand",
    "VllmClassifier",
    "VllmEngine",
    "VllmSettings",
    "chat",
    "classifier",
    "classify",
    "export",
    "fsdp",
    "local",
    "local_group",
    "openai",
    "paired",
    "remote",
    "server_command",
    "vllm",
    "vllm_classifier",
]
