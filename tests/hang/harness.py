"""What the hang tests use: child jobs with hard limits."""

from jobs import JobResult, run_job

__all__ = ["JobResult", "run_job"]
