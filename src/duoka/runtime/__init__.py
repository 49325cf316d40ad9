"""Runtime: tensors to devices, and a model called as `generate`, training and the engine call it.

It knows nothing of planning or terminals; of a plan it takes the placement and the workload.

- `call`: calls a model as `generate` does, as training does, or over a paged cache
- `prompt_reader`: prompts for a model, within the limits of a plan
- `prepare_training`: prepares a model for training, and freezes the parts that no sequence reaches
- `draw`: samples a token from each row of logits
- `optimizers`: the optimizers of a training step
- `devices`: real and virtual devices in torch; `out_of_memory`: explains a lack of memory
- `lost_gpu`: CUDA errors after which a process can't use its GPUs any more
- `publisher`: publishes the memory of a process for `duoka top`
- `image_inputs`: blank images, as arguments of a model's ``forward``
- `dispatch`: the one place where activations change device
- `load`: reads a checkpoint's tensors from the files to their devices
"""
