"""Replicas of a model on the nodes of a Ray cluster, behind Ray Serve's own HTTP proxy.

- `nodes`: the GPUs of the nodes, a plan for each set of GPUs, and the number of replicas
- `replica`: the deployment of Ray Serve: an engine and the web application of `duoka serve`
- `server`: deploys the replicas, serves until stopped, and removes the deployment
"""
