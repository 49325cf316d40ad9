"""Exports held against the tools' own parsers, cut out of their packages.

    pip download --no-deps -d wheels vllm==0.33.0 sglang==0.5.23 ms-swift==4.6.0
    for wheel in wheels/*.whl; do python -m zipfile -e "$wheel" tools; done
    python benchmarks/exports.py tools

Nothing of the tools is installed or imported: they want CUDA, and their own torch. Of each one the
very function that reads what duoka writes is taken from its file and called, for plans of published
shapes on unequal machines; options of command lines must be among those that the tool declares.
Which classes run in a pipeline is read from the classes and compared with `pipelines.json`: what
SGLang's and vLLM's `forward` takes, and whether vLLM's is `SupportsPP`, with all their bases.
`swift_models.json` is compared with ms-swift's table of models.
"""

from __future__ import annotations

import ast
import json
import logging
import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import fields, replace
from itertools import accumulate, chain, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Union

from planner_models import MACHINES, MODELS
from transformers import TrainingArguments

import duoka
from duoka.report.export.stages import to_layer_pipeline

SHAPES = ("glm-4-9b-chat", "llama-3.1-8b", "qwen2.5-32b")
PLACES = ("2 x 24", "24 + 12", "12 + 24", "80 + 24", "8 + 12 + 24", "8 unequal")
QUESTION = duoka.Workload(batch=2, prompt_tokens=4096, new_tokens=256, prefill_chunk_tokens=1024)


class Tool:
    """The files of one tool, unpacked somewhere under a directory."""

    def __init__(self, root: Path, name: str) -> None:
        self.root, self.name = root, name

    @property
    def version(self) -> str:
        for pattern in (f"{self.name}-*.dist-info/METADATA", f"{self.name}-*/PKG-INFO"):
            for path in self.root.rglob(pattern):
                lines = path.read_text(encoding="utf-8").splitlines()
                return next(line[9:] for line in lines if line.startswith("Version: "))
        return "?"

    def tree(self, file: str) -> ast.Module:
        return ast.parse(next(self.root.rglob(f"{self.name}/{file}")).read_text(encoding="utf-8"))

    def function(self, file: str, name: str, **names: Any) -> Callable[..., Any]:
        """One function of a file, with what it looks up outside of itself."""
        found = [
            node
            for node in ast.walk(self.tree(file))
            if isinstance(node, ast.FunctionDef) and node.name == name
        ]
        for argument in ast.walk(found[0]):
            if isinstance(argument, ast.arg):
                argument.annotation = None  # types that aren't imported here
        found[0].returns = None
        scope = dict(names)
        exec(compile(ast.Module(body=list(found), type_ignores=[]), file, "exec"), scope)
        made: Callable[..., Any] = scope[name]
        return made

    def options(self, *files: str) -> set[str]:
        """What looks like an option in some files: texts with dashes, and fields."""
        found: set[str] = set()
        for file in files:
            for path in self.root.rglob(f"{self.name}/{file}"):
                for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                    if isinstance(node, ast.Constant) and str(node.value).startswith("--"):
                        found.add(str(node.value))
                    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                        found.add("--" + node.target.id.replace("_", "-"))
        return found


class Classes:
    """The classes of a tool's files with their bases, by the statements alone."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files: dict[str, ast.Module | None] = {}

    def tree(self, module: str) -> ast.Module | None:
        if module not in self.files:
            path = self.root.joinpath(*module.split("."))
            file = next(
                (f for f in (path.with_suffix(".py"), path / "__init__.py") if f.is_file()), None
            )
            self.files[module] = None if file is None else ast.parse(file.read_text("utf-8"))
        return self.files[module]

    def find(self, module: str, name: str) -> tuple[str, ast.ClassDef] | None:
        """A class by the name that it has in a module: defined there, imported, or renamed."""
        tree = self.tree(module)
        for node in ast.walk(tree) if tree else ():
            if isinstance(node, ast.ClassDef) and node.name == name:
                return module, node
            is_renamed = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name
            if is_renamed and isinstance(node.value, ast.Name) and node.value.id != name:
                return self.find(module, node.value.id)
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return self.find(self._absolute(module, node), alias.name)
        return None

    def _absolute(self, module: str, node: ast.ImportFrom) -> str:
        parts = module.split(".")
        is_package = (self.root.joinpath(*parts) / "__init__.py").is_file()
        kept = parts[: len(parts) - node.level + is_package] if node.level else []
        return ".".join([*kept, *([node.module] if node.module else [])])

    def bases(self, module: str, name: str) -> list[tuple[str, ast.ClassDef]]:
        """A class and all that it has its methods from, but for mere declarations of vLLM's."""
        found = None if name.startswith("VllmModel") else self.find(module, name)
        if found is None:
            return []
        module, node = found
        names = (base.value if isinstance(base, ast.Subscript) else base for base in node.bases)
        inherited = [self.bases(module, each.id) for each in names if isinstance(each, ast.Name)]
        return [(module, node), *chain.from_iterable(inherited)]

    def takes(self, module: str, name: str, argument: str) -> bool:
        """Whether the first `forward` of a class has an argument, or takes any."""
        for _, node in self.bases(module, name):
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and method.name == "forward":
                    of = method.args
                    named = argument in {each.arg for each in (*of.args, *of.kwonlyargs)}
                    return named or (of.kwarg is not None and argument != "pp_proxy_tensors")
        return False


def vllm_classes(root: Path) -> tuple[set[str], set[str]]:
    """The architectures of vLLM that run in a pipeline, and those that don't."""
    package, classes = "vllm.model_executor.models", Classes(root)
    registry = classes.tree(f"{package}.registry")
    assert registry is not None
    pipeline, single = set(), set()
    for node in registry.body:
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Dict):
            continue
        if ast.unparse(node.targets[0]) not in ("_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS"):
            continue
        for architecture, (file, name) in ast.literal_eval(node.value).items():
            module = file if file.startswith("vllm.") else f"{package}.{file}"
            if module == f"{package}.transformers":
                continue
            is_split = "SupportsPP" in {base.name for _, base in classes.bases(module, name)}
            takes = classes.takes(module, name, "intermediate_tensors")
            (pipeline if is_split and takes else single).add(architecture)
    return pipeline, single


def sglang_classes(root: Path) -> tuple[set[str], set[str]]:
    """The same of SGLang; a class has the name of its architecture."""
    pipeline, single, classes = set(), set(), Classes(root)
    folder = next(root.rglob("sglang/srt/models"))
    for path in folder.rglob("*.py"):
        module = ".".join(path.relative_to(root).with_suffix("").parts)
        tree = classes.tree(module)
        assert tree is not None
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "EntryClass":
                for name in (
                    each.id for each in ast.walk(node.value) if isinstance(each, ast.Name)
                ):
                    takes = classes.takes(module, name, "pp_proxy_tensors")
                    # They refuse it themselves.
                    refuses = path.stem in ("nanbeige", "sdar", "sdar_moe", "interns2_mobius")
                    (pipeline if takes and not refuses else single).add(name)
    return pipeline, single


def compare_classes(root: Path) -> int:
    """Print where the table and the sources differ; the number of such classes."""
    table = Path(duoka.__file__).parent / "report/export/pipelines.json"
    known = json.loads(table.read_text("utf-8"))
    wrong = 0
    print("| tool | version | classes in a pipeline | on one GPU | other than in the table |")
    print("|---|---|---|---|---|")
    for name, read in (("vllm", vllm_classes), ("sglang", sglang_classes)):
        pipeline, single = read(root)
        expected, alone = set(known[name]["pipeline"]), set(known[name]["single"])
        # Drafts, embeddings and classifiers of SGLang's have no place in the table.
        other = (expected - pipeline) | (alone - single) | (expected & single) | (alone & pipeline)
        missing = set() if name == "sglang" else (pipeline | single) - expected - alone
        version = Tool(root, name).version
        assert version == known[name]["version"], version
        print(f"| {name} | {version} | {len(expected)} | {len(alone)} | {len(other | missing)} |")
        print(*(f"# {name}: {each}" for each in sorted(other | missing)), sep="\n", end="")
        wrong += len(other | missing)
    print()
    return wrong


def command(plan: duoka.Plan, tool: str) -> tuple[dict[str, str], dict[str, str]]:
    """Environment and options of an exported command line."""
    words = shlex.split(duoka.export(plan, tool).text.replace("\\\n", " "))
    environment = dict(word.split("=", 1) for word in words if "=" in word.partition("-")[0])
    start = next(
        place for place, word in enumerate(words) if word.startswith(("--dtype", "--pipe", "--pp"))
    )
    return environment, dict(zip(words[start::2], words[start + 1 :: 2], strict=True))


def bounds(plan: duoka.Plan) -> list[tuple[int, int]]:
    """The layers of each stage as they were planned."""
    stops = list(accumulate(to_layer_pipeline(plan, "any").counts))
    return list(zip([0, *stops], stops, strict=False))


def vllm(tool: Tool, plan: duoka.Plan) -> None:
    environment, options = command(plan, "vllm")
    partition = environment.get("VLLM_PP_LAYER_PARTITION")
    parse = tool.function(
        "distributed/utils.py", "get_pp_indices",
        envs=SimpleNamespace(VLLM_PP_LAYER_PARTITION=partition), logger=logging.getLogger(),
    )  # fmt: skip
    size = int(options.get("--pipeline-parallel-size", 1))
    assert [parse(bounds(plan)[-1][1], rank, size) for rank in range(size)] == bounds(plan)
    declared = tool.options("engine/arg_utils.py", "entrypoints/common/cli_args.py")
    assert options.keys() <= declared, options.keys() - declared


def sglang(tool: Tool, plan: duoka.Plan) -> None:
    environment, options = command(plan, "sglang")
    parse = tool.function("srt/distributed/utils.py", "get_pp_indices", os=os)
    size = int(options.get("--pp-size", 1))
    os.environ.pop("SGLANG_PP_LAYER_PARTITION", None)
    os.environ |= {name: value for name, value in environment.items() if name.startswith("SGLANG")}
    assert [parse(bounds(plan)[-1][1], rank, size) for rank in range(size)] == bounds(plan)
    declared = tool.options("srt/arg_groups/fields/*.py")
    assert options.keys() <= declared, options.keys() - declared


def swift(tool: Tool, plan: duoka.Plan) -> None:
    folder = "arguments/base_args/model_args.py"
    declared = tool.options("arguments/*.py", "arguments/base_args/*.py", "trainers/arguments.py")
    declared |= {"--" + each.name.replace("_", "-") for each in fields(TrainingArguments)}
    training = replace(
        plan.workload, training=duoka.Training(), new_tokens=0, prefill_chunk_tokens=None
    )
    for each in (plan, replace(plan, workload=training)):
        for text in duoka.export(each, "swift").text.split("\n\n"):
            words = shlex.split(text.replace("\\\n", " "))
            start = words.index("--model")
            options = dict(zip(words[start::2], words[start + 1 :: 2], strict=True))
            unknown = {name.replace("_", "-") for name in options} - declared
            assert not unknown, unknown
            # What `ModelArguments` makes of the texts, in its own words.
            args = SimpleNamespace(max_memory=options["--max_memory"], device_map=None)
            args.device_map = options["--device_map"]
            names = {
                "get_dist_setting": lambda: (-1, -1, 1, 1), "ast": ast, "Union": Union,
                "Dict": dict, "Any": Any, "json_parse_to_dict": read_json,
            }  # fmt: skip
            for method in ("_init_device_map", "_init_max_memory"):
                tool.function(folder, method, **names)(args)
            devices = [plan.fleet.device(name) for name in plan.devices]
            budgets = {number: device.budget_bytes for number, device in enumerate(devices)}
            assert args.max_memory == budgets
            assert set(args.device_map.values()) == set(budgets)


def read_json(value: Any, strict: bool = True) -> Any:
    return json.loads(value) if isinstance(value, str) else value


def compare_swift_models(root: Path) -> int:
    """Print where `swift_models.json` and ms-swift's table differ; the number of such models."""
    path = Path(duoka.__file__).parent / "report/export/swift_models.json"
    table, seen, wrong = json.loads(path.read_text("utf-8")), 0, 0
    assert (root / f"ms_swift-{table['version']}.dist-info").is_dir(), table["version"]
    families, known = {each["family"] for each in table["models"]}, set[str]()
    for node in Tool(root, "swift").tree("model/models/glm.py").body:
        if not isinstance(node, ast.Expr) or "ModelMeta(" not in ast.unparse(node):
            continue
        meta: Any = node.value.args[0]  # type: ignore[attr-defined]
        common = {each.arg: each.value for each in meta.keywords}
        kind = ast.unparse(meta.args[0]).rpartition(".")[2]
        family = ast.literal_eval(common["architectures"])[0]
        if family == "ChatGLMModel":
            family = "GLM-4V" if kind == "chatglm4v" else "ChatGLM"
        for group in meta.args[1].elts if family in families else ():
            settings = common | {each.arg: each.value for each in group.keywords}
            required = ast.literal_eval(settings["requires"])
            for model in group.args[0].elts:
                source = ast.literal_eval(model.args[0]).lower()
                if source in known:  # ms-swift takes the first one
                    continue
                known.add(source)
                entry = next(
                    each
                    for each in table["models"]
                    if each["family"] == family and each["name"] in source
                )
                is_right = f"transformers{entry['transformers']}" in required
                seen += 1
                if not is_right or entry.get("type", kind) != kind:
                    print(f"# ms-swift: {source}: {entry}, not {kind}, {required}")
                    wrong += 1
    print(f"| ms-swift | {table['version']} | {seen} models of GLM | {wrong} other |\n")
    return wrong


TOOLS = {"vllm": vllm, "sglang": sglang, "swift": swift}


def plans() -> Iterator[duoka.Plan]:
    with tempfile.TemporaryDirectory() as directory:
        for shape in SHAPES:
            path = Path(directory) / f"{shape}.json"
            path.write_text(json.dumps({**MODELS[shape], "dtype": "bfloat16"}))
            for place, strategy in product(PLACES, ("balanced", "sequential")):
                limits = duoka.Constraints(strategy=strategy)
                with suppress(duoka.errors.InfeasibleError):
                    yield duoka.plan(path, MACHINES[place], QUESTION, constraints=limits)


def main(directory: str) -> int:
    root, wrong = Path(directory), 0
    made = list(plans())
    print(f"{len(made)} plans of {', '.join(SHAPES)}, up to "
          f"{max(len(plan.devices) for plan in made)} stages\n")  # fmt: skip
    print("| tool | version | plans read as planned | refused by duoka |\n|---|---|---|---|")
    for name, check in TOOLS.items():
        tool, read, refused = Tool(root, name), 0, 0
        for plan in made:
            try:
                check(tool, plan)
                read += 1
            except duoka.errors.UsageError:
                refused += 1  # a GPU that has no layer, say
            except (AssertionError, ValueError) as error:
                print(f"# {name}: {plan.model} on {', '.join(plan.devices)}: {error}")
        wrong += read + refused < len(made)
        print(f"| {name} | {tool.version} | {read} of {len(made) - refused} | {refused} |")
    print()
    wrong += compare_classes(root)
    wrong += compare_swift_models(root)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
