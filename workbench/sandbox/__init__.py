"""Sandboxes that run model code: in isolated processes of this machine, in containers, or at a SandboxFusion service, by one contract."""

from workbench.sandbox.containers import Containers
from workbench.sandbox.local import LocalSandbox
from workbench.sandbox.protocol import LANGUAGES, Phase, Program, Result, Sandbox
from workbench.sandbox.remote import RemoteSandbox, answer, serve
from workbench.sandbox.workspaces import LocalWorkspace, Workspace, Workspaces

container = Containers
local = LocalSandbox
remote = RemoteSandbox

__all__ = [
    "LANGUAGES",
    "Containers",
    "LocalSandbox",
    "LocalWorkspace",
    "Phase",
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
