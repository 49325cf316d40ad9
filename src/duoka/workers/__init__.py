"""Worker processes: how they are started, supervised and ended; without importing torch.

- `process`: a child process that ends with its parent; `group`: one process for each rank
- `worker`: the child's side: its channel to the parent, and its exit code
- `channel`: messages between parent and child, also for asyncio; results of functions
- `portable`: errors in a form that can be pickled
- `supervision`: when to restart a lost process, and how long a process may be silent
- `signals`: signal handlers for the time that workers run
"""
