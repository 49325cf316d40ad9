"""Replicas of a model on the nodes of a Ray cluster, behind Ray Serve's own HTTP proxy.

- `nodes`: the GPUs of the nodes, a plan for each kind of node, and the number of replicas
- `replica`: the application of `duoka serve` around an engine, as Ray Serve runs it
- `server`: the replicas deployed, an address that answers, and the cluster left as it was
"""
