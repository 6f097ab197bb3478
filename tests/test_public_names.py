"""The front door, pinned: what users import, and that each name says what it is."""

from __future__ import annotations

import inspect

import workbench as wb

NAMES = {
    "COLUMNS", "BaseInteraction", "DataProto", "Evaluation", "Origin", "Outcome", "Pipeline", "Run", "RunStopped", "SamplingSettings", "Score",
    "Status", "Stepper", "Trace", "WorkbenchError", "agents", "chat", "cluster", "compare", "compat", "datasets", "diverge", "doctor", "engines", "evaluate", "free_memory", "functional", "list_runs", "load_run", "prepare_notebook",
    "recipes", "reward_from", "rewards", "rows", "run_notebook", "sandbox", "stage", "stages", "train", "train_blocking", "tune", "views", "what_if",
}  # fmt: skip
AGENTS = {
    "AgentLoopBase", "AgentLoopOutput", "SingleTurn", "ToolAgent", "agent_loop", "register", "register_agent_loop",
    "BaseTool", "Calculator", "Gsm8kAnswer", "MCPServer", "MCPTool", "PythonTool", "Search", "Corpus", "function_tool", "load_tools", "mcp_tools",
    "HermesParser", "Qwen3CoderParser", "ReActParser", "ToolArgsParser", "tool_parser",
    "BaseInteraction", "Gsm8kInteraction", "RemoteInteraction", "interacting", "load_interactions",
    "GymInteraction", "VerifiersInteraction", "environment_rows", "verifiers_rows",
}  # fmt: skip
TRAIN = [
    "pipeline", "rows", "steps", "epochs", "run", "batch_size", "seed", "ahead", "max_lag", "stale", "eval_rows", "test_freq", "val_samples", "save_freq",
    "trace_freq", "keep_traces", "keep_checkpoints", "keep_updates", "keep_val", "max_recoveries", "max_rollout_kl", "break_if", "save_best", "stop_when", "patience", "min_delta", "resume", "allow_changes", "trackers", "project", "experiment", "display", "observers",
    "health",
]  # fmt: skip


def test_the_front_door_is_pinned() -> None:
    assert set(wb.__all__) == NAMES and len(NAMES) <= 43
    for name in NAMES - {"COLUMNS"}:
        assert inspect.getdoc(getattr(wb, name)), name


def test_completion_shows_what_is_for_users() -> None:
    assert sorted(dir(wb)) == sorted(wb.__all__)
    for name in ("agents", "cluster", "engines", "recipes", "rewards", "stages", "views"):
        assert sorted(dir(getattr(wb, name))) == sorted(getattr(wb, name).__all__), name
    assert not {"Any", "Callable", "message", "unknown"} & set(dir(wb.recipes))


def test_what_users_take_from_agents_is_there() -> None:
    assert set(wb.agents.__all__) >= AGENTS
    for name in wb.agents.__all__:
        assert inspect.getdoc(getattr(wb.agents, name)), name


def test_parameters_that_users_type_are_pinned() -> None:
    assert list(inspect.signature(wb.train).parameters) == TRAIN
    assert list(inspect.signature(wb.Stepper).parameters) == ["pipeline", "batch", "settings"]


def test_engines_show_every_setting() -> None:
    """As Shift-Tab does; a setting that the function names itself is there once."""
    engines = wb.engines
    doors = {engines.local: engines.LocalSettings, engines.reward_model: engines.LocalSettings}
    doors |= {engines.fsdp: engines.FsdpSettings, engines.remote: engines.RemoteSettings}
    doors |= {engines.vllm: engines.VllmSettings, engines.vllm_classifier: engines.VllmSettings}
    for door, settings in doors.items():
        parameters = inspect.signature(door).parameters
        assert {*settings.field_names()} <= parameters.keys(), door.__name__
        assert not any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values()), door.__name__
    assert inspect.signature(engines.local).parameters["lr"].default == engines.LocalSettings().lr


def test_everything_public_is_documented_and_typed() -> None:
    for module in (wb.functional, wb.recipes, wb.stages, wb.engines, wb.agents, wb.rewards, wb.datasets, wb.views):
        for name in getattr(module, "__all__", ()):
            thing = getattr(module, name)
            if inspect.isfunction(thing):
                assert inspect.getdoc(thing), name
                assert inspect.signature(thing).return_annotation is not inspect.Signature.empty, name
