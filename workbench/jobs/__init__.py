"""A notebook as a job: the door to training, the runner, the papermill engine, the report."""
