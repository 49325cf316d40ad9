"""Tuner: fine-tuning by a plan, over all GPUs, with one process per GPU.

- `tune`, `settings`: fine-tune a model on data, and the settings of a run
- `prepare`: plan a run and read its samples
- `suggestions`: settings that would fit, in the options of `duoka tune`
- `data`: the user's files → micro-batches of token ids
- `run`: the directory of a run; `worker`, `__main__`: a worker process
- `part`: the weights of one process; `layout`: ranks; `gradient_sum`: sums over replicas
- `trainer`: passes of micro-batches through stages, and optimizer steps; `preferences`: DPO
- `dropout`: the same dropout on any number of GPUs
- `learning_rate`: the learning rate by step
- `checkpoints`, `optimizer_states`: save a run, and resume it on other GPUs
- `reporter`, `trackers`: progress of a run; `report`: its summary
- `write_errors`: errors of a full disk, with the name of the file
- `result`: adapters and merged checkpoints in published formats
"""
