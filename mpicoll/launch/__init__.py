"""How a job is started: the environment, the launcher, spawn."""
