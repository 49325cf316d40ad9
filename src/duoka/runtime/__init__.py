"""Runtime: tensors to devices, and a model called as `generate`, training and the engine call it.

It knows nothing of planning or terminals; of a plan it takes the placement, and the workload.

- `call`: the callers of models: of `generate`, of training, and over a paged cache
- `prompt_reader`: prompts for a model, within the limits of a plan
- `prepare_training`: a model prepared for training, with unreached towers frozen
- `draw`: a token from each row of logits
- `optimizers`: the optimizers of a training step
- `devices`: real and virtual devices in torch; `out_of_memory`: explains a lack of memory
- `lost_gpu`: errors of CUDA after which a process computes nothing more
- `publisher`: publishes the memory of a process for `duoka top`
- `image_inputs`: made-up images, as a model's ``forward`` takes them
- `dispatch`: the one place where activations change device
- `load`: tensors from the files to their devices
"""
