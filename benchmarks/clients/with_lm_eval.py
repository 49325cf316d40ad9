"""lm-evaluation-harness: `local-completions` and `local-chat-completions`."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import lm_eval
from checks import KEY, LLAMA, MODEL, check, main
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI
from lm_eval.tasks import TaskManager

os.environ["OPENAI_API_KEY"] = KEY
URL = f"{LLAMA}/v1/completions"
SETTINGS: dict[str, Any] = {"base_url": URL, "model": MODEL, "max_length": 2048, "max_gen_toks": 20}
SETTINGS |= {"tokenizer": os.environ.get("LLAMA_DIRECTORY"), "max_retries": 1}
UNTIL = {"until": ["never"], "max_gen_toks": 20}
TASK = """
task: tiny
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: KIND
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
doc_to_choice: [" yes", " no"]
generation_kwargs: {until: ["zz"], max_gen_toks: 9}
metric_list: [{metric: METRIC}]
"""


def requests(kind: str, *arguments: Any) -> list[Instance]:
    return [Instance(request_type=kind, doc={}, arguments=each, idx=0) for each in arguments]


@check
def likelihoods() -> None:
    pairs = [("hello", " world"), ("a", "b"), ("once upon a", " time")]
    values = [
        LocalCompletionsAPI(**SETTINGS, **options).loglikelihood(requests("loglikelihood", *pairs))
        for options in (
            {}, {"batch_size": 2}, {"num_concurrent": 3}, {"tokenized_requests": False},
        )
    ]  # fmt: skip
    for value in values:
        for (score, greedy), (expected, same) in zip(value, values[0], strict=True):
            assert abs(score - expected) < 1e-3
            assert greedy == same
    rolling = LocalCompletionsAPI(**SETTINGS).loglikelihood_rolling(
        requests("loglikelihood_rolling", ("hello world",))
    )
    assert rolling[0] < 0


@check
def generations() -> None:
    prompts = [("Once upon", {**UNTIL}), ("There was", {**UNTIL}), ("a", {**UNTIL})]
    values = [
        LocalCompletionsAPI(**SETTINGS, **options).generate_until(
            requests("generate_until", *prompts)
        )
        for options in (
            {}, {"batch_size": 2}, {"num_concurrent": 3}, {"tokenized_requests": False},
        )
    ]  # fmt: skip
    assert all(value == values[0] for value in values), values
    assert all(values[0]), values[0]


@check
def chats() -> None:
    options = {**SETTINGS, "base_url": URL.replace("completions", "chat/completions")}
    del options["tokenizer"]
    model = LocalChatCompletion(**options)
    history = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    prompt = model.apply_chat_template(history)
    (answer,) = model.generate_until(requests("generate_until", (prompt, {**UNTIL})))
    assert answer


@check
def tasks() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = [{"question": f"Is {number} even?", "answer": number % 2} for number in range(4)]
        data = folder / "data.jsonl"
        data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        for kind, metric, model in (
            ("multiple_choice", "acc", "local-completions"),
            ("generate_until", "exact_match", "local-completions"),
            ("generate_until", "exact_match", "local-chat-completions"),
        ):
            task = TASK.replace("FILE", str(data)).replace("KIND", kind).replace("METRIC", metric)
            (folder / "tiny.yaml").write_text(task)
            options = dict(SETTINGS)
            if "chat" in model:
                options["base_url"] = URL.replace("completions", "chat/completions")
            result = lm_eval.simple_evaluate(
                model, options, ["tiny"], task_manager=TaskManager(include_path=name),
                apply_chat_template="chat" in model, bootstrap_iters=0,
            )  # fmt: skip
            assert result["n-samples"]["tiny"]["effective"] == 4


main()
