"""Engines: models that sample, score and learn behind the stages; `protocol` has the contracts, the rest the kinds."""

from workbench.engines.fsdp_engine.engine import FsdpEngine, fsdp
from workbench.engines.fsdp_engine.folders import export
from workbench.engines.fsdp_engine.group import Group, local_group
from workbench.engines.http.chat import ClassifyEndpoint, OpenAIChat, SamplerChat, serve
from workbench.engines.http.sampler import RemoteSampler, remote
from workbench.engines.http.server import RemoteSettings, ServerCommand, server_command
from workbench.engines.local_engine.classifier import LocalClassifier, classifier
from workbench.engines.local_engine.engine import LocalEngine, local
from workbench.engines.local_engine.reward_model import LocalRewardModel, reward_model
from workbench.engines.paired import Paired, paired
from workbench.engines.protocol import (
    ChatModel,
    Classified,
    Classifier,
    Completion,
    Learner,
    LogProbModel,
    Loss,
    LossCounts,
    LossOutput,
    Request,
    Sample,
    Sampler,
    SamplingSettings,
    StepResult,
)
from workbench.engines.settings import FsdpSettings, LocalSettings
from workbench.engines.vllm_server.engine import VllmClassifier, VllmEngine, VllmSettings, vllm, vllm_classifier

chat = SamplerChat
openai = OpenAIChat
classify = ClassifyEndpoint

__all__ = [
    "ChatModel", "Classified", "Classifier", "ClassifyEndpoint", "Completion", "FsdpEngine", "FsdpSettings", "Group", "Learner",
    "LocalClassifier", "LocalEngine", "LocalRewardModel", "LocalSettings", "LogProbModel", "Loss", "LossCounts", "LossOutput",
    "OpenAIChat", "Paired", "RemoteSampler", "RemoteSettings", "Request", "Sample", "Sampler", "SamplerChat", "SamplingSettings",
    "ServerCommand", "StepResult", "VllmClassifier", "VllmEngine", "VllmSettings", "chat", "classifier", "classify", "export",
    "fsdp", "local", "local_group", "openai", "paired", "remote", "reward_model", "serve", "server_command", "vllm",
    "vllm_classifier",
]  # fmt: skip
