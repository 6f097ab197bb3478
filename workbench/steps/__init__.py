"""One step as values: traces, the stepper, execution, comparison of two steps, what-if."""
