"""Reports of errors between ranks, as users read them."""
