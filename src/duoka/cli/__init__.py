"""The command line: parse, call duoka's public functions, print.

Answers go to the standard output, everything else to the standard error. Modules that import torch
are imported inside the commands, so that ``--help`` starts at once.

- `main`: the program and its commands; `signals`, `errors`, `machine`: signals and error reports
- `plan`, `check`, `generate`, `chat`, `serve`, `tune`, `merge`, `gpus`, `doctor`,
  `selftest`, `top`, `bench`, `demo`: one command each
- `deployments`: the comparison of deployments by `bench`
- `options`, `training_options`, `groups`: options shared by several commands
- `images`: images from files and URLs; `batch_file`: files of prompts
- `planning`: from options to a plan; `replicas`: plans of replicas; `suggestions`: alternatives
- `terminal`: printed output and written files
"""

import signal
import sys

try:
    from .main import main
except KeyboardInterrupt:  # Ctrl-C during the imports
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stderr.write("stopped\n")
    raise SystemExit(130) from None

__all__ = ["main"]
