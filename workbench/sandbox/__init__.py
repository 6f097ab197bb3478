"""Where model code runs: one `/run_code` contract, in an isolated process here or at a SandboxFusion service."""

from workbench.sandbox.local import LocalSandbox
from workbench.sandbox.protocol import LANGUAGES, Phase, Program, Result, Sandbox
from workbench.sandbox.remote import RemoteSandbox
from workbench.sandbox.service import answer, serve

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
