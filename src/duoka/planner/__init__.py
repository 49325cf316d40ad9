"""Planner: a request and a profile become the best plan, or suggestions if nothing fits.

- `request`, `constraints`: a request, a problem (a request on a fleet), and their constraints
- `limits`: the constraints, translated for one model and one fleet
- `resolve`: plans a request for a checkpoint
- `solve`: plans a problem: the best placement (`planner`), the largest workload (`max_workload`),
  or a given device map (`from_device_map`)
- `search`: the exact optimum over cuts and devices
- `page_count`: the number of pages of a paged KV cache that fit
- `room`: the recommended free memory, and the preference among prefill chunks
- `offload`: the weights that may stay in CPU memory
- `host_experts`: the fastest placement with the experts of some layers in host memory
- `expert_cache`: the sizes of caches for experts that GPUs fetch from there
- `suggestions`, `gpu_upgrades`: changes that make a workload fit
- `out_of_memory`: suggestions if a device has less memory at run time than planned
- `replicas`: data-parallel replicas of a model on one fleet
- `placement`, `plan`: module → device; the plan as one file
- `plan_profile`: the profile of a plan's model
- `device_map`: validation of a user's device map
- `reasons`, `explain`: the reasons of a plan, and its boundaries
- `command_line`: the command-line options of a request
"""
