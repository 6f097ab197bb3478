"""Contract suites: what any engine, stage or reward can inherit to prove that it keeps its promises."""
