"""How a rank joins and leaves a job."""
