"""Worker processes: started, watched and ended in one way, without torch.

- `process`: a child process that ends with its parent; `group`: one process for each rank
- `worker`: the child's side: its channel to the parent, and its exit code
- `channel`: messages between both, also for asyncio, and results or errors of a function
- `portable`: errors in a form that pickle can send
- `supervision`: when a lost process is started again, and how long one may be silent
- `signals`: handlers of signals for as long as workers run
"""
