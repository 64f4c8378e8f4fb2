"""Messages between ranks about errors, searches for deadlocks, and the reports made of them."""
