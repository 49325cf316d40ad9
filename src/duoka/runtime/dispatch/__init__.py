"""Dispatch: the only package in which activations change device. It doesn't know the planner.

- `dispatch`, `install_movers`: places a model on devices and puts movers on its blocks; undoes both
- `arguments`: the rule for which tensors of a call are brought to a block's device
- `copies`: copies between devices, through the host where direct copies between GPUs fail
- `movers`: bring inputs to a block's device, each tensor once per call, and outputs back
- `classes`: subclasses given to blocks and models, which call the movers
- `place_tensors`: moves parameters and buffers to their devices
- `offload`: weights that stay on the host, streamed into two buffers on the GPU
"""
