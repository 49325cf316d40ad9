"""Tools: programs that stand on the public functions: the demo and the bench."""
