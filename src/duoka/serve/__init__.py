"""Serve: an engine behind an address, as OpenAI's clients know it. Its face is `server.serve`.

The server's process has neither torch nor a GPU: each engine is a process of its own, which is
started again when it ends.

- `server`: opens engines, then listens; `address`: where, and who may ask
- `app`: what each address answers, with a `service`; `page`: the files of the page at its root
- `requests`, `answers`, `errors`: the forms of OpenAI's interface; `streams`: pieces of answers
- `responses`, `anthropic`: two other forms of chats; `response_answer`, `message_answer`: what is
  answered in them, as `parts`
- `remote_images`: what requests name by its address, fetched
- `limits`: what is hostile or slow, and who may ask; `metrics`: what Prometheus reads
- `pool`: the engines behind one address; `engine_client`: one of them, as the server has it
- `vllm`: another engine, started by a plan and held to it
- `on_ray`: engines on the nodes of a Ray cluster
- `engine_process`, `__main__`: one of them, as a process; `messages`: what both tell each other
- `questions`: what a prompt becomes there, and what reads its answer
"""
