"""Print the lower bounds of pyproject.toml as constraints, for `make oldest`."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]


def lower_bounds() -> list[str]:
    """Each requirement of the project at its lower bound, apart from torch's and Ray's."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    requirements = [Requirement(line) for group in groups for line in group]
    return [
        f"{each.name}=={bound.version}"
        for each in requirements
        for bound in each.specifier
        if bound.operator == ">=" and each.name not in ("torch", "ray")
    ]


if __name__ == "__main__":
    sys.stdout.write("\n".join(lower_bounds()) + "\n")
