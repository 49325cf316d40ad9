"""Dispatch: the one place where activations change device. How a placement is found isn't known.

- `dispatch`, `install_movers`: a model → the same, with movers at its stages' borders; and back
- `arguments`: which tensors of a call are brought to a block, by one rule for all
- `copies`: from device to device, around pairs of GPUs whose copies don't arrive
- `movers`: inputs to the device of a stage, each tensor once; outputs back
- `classes`: what a block's or the model's class does besides
- `place_tensors`: parameters and buffers on their devices
- `offload`: weights that stay on the host, streamed into two buffers
"""
