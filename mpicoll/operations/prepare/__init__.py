"""From the arguments of each collective call to what moves: checked on this rank, and raised on all members if wrong."""
