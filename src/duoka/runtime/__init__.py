"""Runtime: tensors to devices, and a model called as `generate`, training and the engine call it.

It knows nothing of planning or terminals; of a plan it takes the placement, and the workload.

- `prompt_reader`: prompts for a model, within what was planned
- `steps`: a model called as `generate` and a training loop do
- `text_training`: a model made ready to be trained on text, with towers frozen
- `paged_steps`, `paged_attention`: a model called with many sequences over a paged cache
- `draw`: a token from each row of logits
- `optimizers`: what a training step ends with
- `devices`: what torch knows of real and virtual devices; `out_of_memory`: why one had no room
- `lost_gpu`: errors of CUDA after which a process computes nothing more
- `publisher`: what memory a process says it has, for `duoka top`
- `encode_images`: images to features, some at a time, before their prompt is read
- `image_inputs`: made-up images, as a model's ``forward`` takes them
- `dispatch`: the one place where activations change device
- `load`: tensors from the files to their devices
"""
