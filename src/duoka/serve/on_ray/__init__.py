"""Ray: replicas of plans on the nodes of a cluster, as applications of Ray Serve.

Requests come to the server of `duoka serve` as always; its engines are then kinds of nodes, each
with a plan and an application of its own, whose replicas hold an engine each.

- `nodes`: what GPUs the nodes have, and which of them are alike; a plan and replicas for each kind
- `replica`: an engine as Ray Serve runs it, and where replicas tell how they are
- `pool`: all replicas of a kind, as the server has them, and the kinds behind one address
"""
