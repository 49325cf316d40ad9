"""The command line: parse, call duoka's public functions, print.

The answer goes to the standard output, everything else to the standard error. What needs torch is
imported inside the commands, so that ``--help`` starts at once.

- `main`: the program and its commands; `signals`, `errors`, `machine`: what ends it early
- `plan`, `check`, `generate`, `chat`, `serve`, `tune`, `plot`, `compare`, `gpus`, `doctor`, `top`,
  `bench`, `demo`, `completion`: a command each
- `deployments`: what `bench` tells of a model
- `options`, `training_options`, `groups`: the options that commands share
- `images`: pictures in files and at addresses on the web; `batch_file`: prompts in files
- `planning`: from options to a plan; `replicas`, `suggestions`: several plans, other ways
- `terminal`: what is printed and written
"""

import signal
import sys

try:
    from .main import main
except KeyboardInterrupt:  # the program was stopped while it started
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stderr.write("stopped\n")
    raise SystemExit(130) from None

__all__ = ["main"]
