"""Tuner: fine-tuning by plan, over all GPUs, in a process for each.

- `tune`, `settings`: from a model and data to the result, and what a person says of it
- `prepare`: the plans, and what is learnt
- `suggestions`: what would fit instead, in the options of `duoka tune`
- `data`: the user's files → micro-batches of token ids
- `run`: the directory of a run; `worker`, `__main__`: a process of it
- `part`: the weights of one process; `layout`: which process has which, and sums of gradients
- `trainer`: micro-batches through stages, and the optimizer's steps
- `dropout`: the same dropout on any number of GPUs
- `learning_rate`: the learning rate by step
- `checkpoints`, `optimizer_states`: a run saved, and resumed on other GPUs
- `reporter`, `report`, `plot`: what a person sees of it, on the way and in the end
- `write_errors`: errors of a full disk, with the name of what is written
- `result`: adapters and merged checkpoints, as others load them
"""
