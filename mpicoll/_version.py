"""The version, in one place that setup.cfg reads without importing anything else."""

__version__ = "0.1.0"
