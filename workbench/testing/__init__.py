"""Contract suites: what any engine, stage, reward, tool, parser or simulated user can inherit to prove that it keeps its promises."""
