"""Serve: an engine behind an address, as OpenAI's clients know it. Its face is `server.serve`.

The server's process has neither torch nor a GPU: each engine is a process of its own, which is
started again when it ends.

- `server`: opens engines, then listens; `address`: where, and who may ask
- `app`: the answers of each path, with a `service`; `page`: the files of the page at its root
- `requests`, `answers`, `errors`: requests, answers and errors in the form of OpenAI's interface
- `responses`, `anthropic`: requests of two other interfaces; `response_answer`, `message_answer`:
  their answers, in blocks as `blocks` has them
- `streams`: answers to requests, whole or as server-sent events
- `remote_images`: images of requests, fetched from their addresses
- `limits`: limits for hostile and slow clients, and the key; `metrics`: metrics for Prometheus
- `pool`: the engines behind one address; `engine_client`: one of them, as the server has it
- `vllm`: another engine, started by a plan and held to it
- `on_ray`: engines on the nodes of a Ray cluster
- `engine_process`, `__main__`: one of them, as a process; `messages`: what both tell each other
- `questions`, `chats`: requests as the engine takes them, with the reader of their answers
"""
