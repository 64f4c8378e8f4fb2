"""Services that all other packages use: settings, output, call sites, waiting, signals."""
