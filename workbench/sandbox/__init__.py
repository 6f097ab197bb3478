"""Sandboxes that run model code: in isolated processes of this machine, in containers, or at a SandboxFusion service,
all with the same interface.
"""

from workbench.sandbox.containers import Containers
from workbench.sandbox.local import LocalSandbox, LocalWorkspace
from workbench.sandbox.protocol import LANGUAGES, ProcessOutcome, Program, Result, Sandbox, Workspace, Workspaces
from workbench.sandbox.remote import RemoteSandbox, answer, serve

container = Containers
local = LocalSandbox
remote = RemoteSandbox

__all__ = [
    "LANGUAGES",
    "Containers",
    "LocalSandbox",
    "LocalWorkspace",
    "ProcessOutcome",
    "Program",
    "RemoteSandbox",
    "Result",
    "Sandbox",
    "Workspace",
    "Workspaces",
    "answer",
    "container",
    "local",
    "remote",
    "serve",
]
