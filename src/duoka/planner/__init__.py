"""Planner: a request and a profile become the best plan, or suggestions of alternatives.

- `request`, `constraints`, `limits`: a request, its demands, and these for one model and one fleet
- `resolve`: a request for a checkpoint to its plan
- `solve`: a problem to its plan or a reason: the best (`planner`), that for the largest workload
  (`max_workload`), or that of a map (`from_device_map`)
- `search`: the exact optimum over cuts and devices
- `page_count`: the number of pages of a cache that fit
- `room`: the memory to leave free on each device, and the order of preference
- `offload`: the weights that may stay in the host's memory
- `suggestions`, `gpu_upgrades`: alternatives where nothing fits; `out_of_memory`: where something
  else has taken memory since
- `replicas`: several copies of a model on one fleet
- `placement`, `plan`: module → device; the plan as one file
- `plan_profile`: the profile of a plan's model
- `device_map`: maps by hand
- `reasons`, `explain`, `compare`: the reasons of a plan, its rivals, and two plans side by side
- `command_line`: the command that asks for a plan again
"""
