"""Transport over MPI."""
