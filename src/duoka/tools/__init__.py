"""Tools: programs that stand on the public functions.

- `demo`: everything once, on a small model that is made on the spot
- `bench`: what only running can tell
- `doctor`: what is wrong with a machine, and what to do
"""
