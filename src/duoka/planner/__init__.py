"""Planner: a request and a profile become the best plan, or what would fit instead.

- `request`, `constraints`, `limits`: what was asked, what it demands, and what that means for one
  model and one fleet
- `resolve`: a request to its plan, by one of its `modes`: the best (`planner`), the largest
  (`max_workload`), or that of a map (`from_device_map`)
- `search`: the exact optimum over cuts and devices
- `page_count`: how many pages of a cache fit
- `room`: what is left free on each device, and what is tried in which order
- `offload`: the weights that may stay in the host's memory
- `suggestions`, `gpu_upgrades`: what would fit where nothing does; `out_of_memory`: where something
  else has taken memory since
- `replicas`: several copies of a model on one fleet
- `placement`, `plan`: module → device; the plan as one file
- `plan_profile`: what is known of a plan's model besides the plan
- `device_map`: maps that people write
- `reasons`, `explain`, `compare`: why a plan is as it is, and two side by side
- `command_line`: the command that asks for a plan again
"""
