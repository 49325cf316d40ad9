"""Tools: programs that stand on the public functions.

- `demo`: everything once, on a small model that is made on the spot
- `top`: every GPU now, and what duoka's processes have of it
- `bench`: what only running can tell
- `doctor`: what is wrong with a machine, and what to do
"""
