"""Commands beside the stages: set-up, tests, quickstart, export."""
