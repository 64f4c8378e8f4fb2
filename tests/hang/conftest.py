"""Hang tests start jobs of their own; under mpiexec each rank would start them all."""
