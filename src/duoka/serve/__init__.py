"""Serve: an HTTP server for engines, with OpenAI-compatible APIs; entry point `server.serve`.

The server's process uses neither torch nor a GPU: each engine runs in a process of its own, which
is restarted when it ends unexpectedly.

- `server`: opens the engines, then listens; `address`: host, port and API key
- `app`: the routes, which call a `service`; `page`: the files of the web page at the root
- `forms`: the fields that all requests take alike
- `requests`, `answers`, `errors`: requests, responses and errors of OpenAI's chats and completions
- `responses`, `anthropic`: requests of OpenAI's Responses API and Anthropic's Messages API;
  `response_answer`, `message_answer`: their responses, which consist of `blocks`
- `streams`: responses as one JSON object or as server-sent events
- `remote_images`: download of the images of requests
- `limits`: limits of requests, and the API key; `request_log`: ids and log of requests; `metrics`:
  Prometheus metrics
- `pool`: the engines behind one address; `engine_client`: the server's side of one engine
- `on_ray`: engines on the nodes of a Ray cluster
- `engine_process`, `__main__`: the process of an engine; `messages`: messages to and from it
- `questions`, `chats`: conversion of a request to token ids and sampling parameters
"""
