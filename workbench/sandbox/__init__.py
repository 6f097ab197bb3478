"""Sandboxes that run model code: in isolated processes of this machine, or at a SandboxFusion service, by one contract."""

from workbench.sandbox.local import LocalSandbox
from workbench.sandbox.protocol import LANGUAGES, Phase, Program, Result, Sandbox
from workbench.sandbox.remote import RemoteSandbox, answer, serve

local = LocalSandbox
remote = RemoteSandbox

__all__ = [
    "LANGUAGES",
    "LocalSandbox",
    "Phase",
    "Program",
    "RemoteSandbox",
    "Result",
    "Sandbox",
    "answer",
    "local",
    "remote",
    "serve",
]
