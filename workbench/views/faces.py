"""The table of which function shows which class: names only, imported when an object is first shown."""

_DOCUMENTS = {
    "workbench.agents.stepping:EpisodeTree": "transcripts:tree",
    "workbench.agents.loop:AgentLoopBase": "transcripts:agent_loop",
    "workbench.agents.stepping:EpisodeStepper": "transcripts:episode",
    "workbench.cluster.fitting:Fit": "clusters:fit",
    "workbench.cluster.pools:Plan": "clusters:plan",
    "workbench.cluster.status:Profile": "clusters:profile",
    "workbench.cluster.ranks:RayRanks": "clusters:group",
    "workbench.cluster.session:Cluster": "clusters:cluster",
    "workbench.cluster.simulating:Simulation": "clusters:simulation",
    "workbench.cluster.status:Logs": "clusters:logs",
    "workbench.cluster.status:ClusterStatus": "clusters:status",
    "workbench.cluster.timeline:Timeline": "clusters:timeline",
    "workbench.dataproto.core:DataProto": "traces:batch",
    "workbench.datasets.preferences:Samples": "traces:data",
    "workbench.datasets.rows:Report": "traces:data",
    "workbench.datasets.rows:Rows": "traces:data",
    "workbench.replay.audit:Audit": "comparisons:audit",
    "workbench.replay.chat:Chat": "chats:chat",
    "workbench.replay.diagnosis:Diagnosis": "comparisons:diagnosis",
    "workbench.replay.publishing:Publication": "traces:data",
    "workbench.replay.run:Run": "traces:run",
    "workbench.replay.run:Summary": "traces:summary",
    "workbench.replay.run:Traces": "traces:traces",
    "workbench.replay.run:Replayed": "traces:stepper",
    "workbench.replay.rebuild:Counterfactual": "traces:counterfactual",
    "workbench.rewards.trials:DryRun": "rewards:dry_run",
    "workbench.rewards.judge_reports:JudgeReport": "judges:judge_report",
    "workbench.rewards.trials:Pin": "rewards:pin",
    "workbench.rewards.trials:PinCheck": "rewards:pin_check",
    "workbench.rewards.trials:Pins": "rewards:pins",
    "workbench.rewards.principle_search:Principles": "judges:principles",
    "workbench.rewards.reward:Reward": "rewards:reward",
    "workbench.rewards.reward:Rubric": "rewards:rubric",
    "workbench.rewards.score:Score": "rewards:score",
    "workbench.runs.evaluate:Evaluation": "samples:evaluation",
    "workbench.runs.preflight:Preflight": "traces:preflight",
    "workbench.runs.symptoms:Symptoms": "traces:symptoms",
    "workbench.stages.pipeline:Pipeline": "traces:pipeline",
    "workbench.stages.stage:Outcome": "traces:outcome",
    "workbench.steps.compare:Comparison": "comparisons:comparison",
    "workbench.steps.compare:RunDivergence": "comparisons:divergence",
    "workbench.steps.stepper:Stepper": "traces:stepper",
    "workbench.steps.trace:Phase": "traces:phase",
    "workbench.steps.trace:Trace": "traces:trace",
    "workbench.steps.tune:Tuning": "traces:tuning",
    "workbench.steps.what_if:WhatIf": "comparisons:what_if",
}
"""Class → the function, in a module of `views`, that makes its document."""

_WIDGETS = {
    "workbench.agents.stepping:EpisodeStepper": "EpisodeFace",
    "workbench.cluster.status:ClusterStatus": "ClusterTable",
    "workbench.steps.stepper:Stepper": "StepperFace",
    "workbench.views.samples:SamplesView": "SamplesTable",
    "workbench.views.tokens:Tokens": "TokenView",
}
"""Class → its widget."""
FACES = {name: {"document": f"workbench.views.{function}"} for name, function in _DOCUMENTS.items()}
for _name, _widget in _WIDGETS.items():
    FACES.setdefault(_name, {})["widget"] = f"workbench.widgets.layer:{_widget}"
FACES["workbench.agents.stepping:EpisodeTree"] |= {
    "credit": "workbench.views.transcripts:credit",
    "frame": "workbench.views.transcripts:frame",
}
FACES["workbench.replay.chat:Chat"]["widget"] = "workbench.widgets.chat:ChatFace"
FACES["workbench.replay.run:Run"] |= {
    "curves": "workbench.views.traces:run_curves",
    "figure": "workbench.views.traces:run_figure",
    "history": "workbench.views.history:run_history",
    "live": "workbench.widgets.display:run_live",
    "tensorboard": "workbench.widgets.display:run_tensorboard",
}
FACES["workbench.steps.compare:Comparison"]["row"] = "workbench.views.sample_table:compared_row"
FACES["workbench.views.plots:Growing"] = {"cover": "workbench.widgets.layer:Cover"}
FACES["workbench.views.curves:LiveFigure"] = {"widget": "workbench.widgets.layer:CurvePlots"}
FACES["workbench.rewards.judge_reports:JudgeReport"]["figure"] = "workbench.views.judges:judge_figure"
