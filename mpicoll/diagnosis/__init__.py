"""What ranks tell each other when something is wrong, and the reports made of it."""
