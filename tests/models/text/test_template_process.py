"""Templates as attackers write them, each in a process with limits; and as honest people do."""

# A template is easier to judge on one line.
# ruff: noqa: E501
from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from duoka.errors import CheckpointError, UsageError
from duoka.models.text import template_process
from duoka.models.text.template_process import MOST_TEMPLATE_CHARACTERS, render

pytestmark = pytest.mark.process

CHAT = [
    {"role": "system", "content": "be <brief> & 'kind'"},
    {"role": "user", "content": '你好\n"quoted" {{ 7 * 7 }} {% raw %}'},
    {"role": "assistant", "content": " hello "},
    {"role": "user", "content": "bye"},
]
TOOLS = [{"name": "weather", "parameters": {"type": "object", "properties": {"city": {}}}}]
VARIABLES = {"bos_token": "<s>", "eos_token": "</s>", "tools": TOOLS, "documents": None}

HONEST = [
    "{{ bos_token }}{% for m in messages %}\n  {% if m.role == 'user' %}\n[INST] {{ m.content | trim"
    " }} [/INST]\n  {%- else %}{{ m['content'] }}{{ eos_token }}{% endif %}\n{% endfor %}",
    "{% for m in messages if m.role != 'system' %}{{ loop.index0 }}{{ loop.last }}{{ m.content }}"
    "{% if loop.index > 2 %}{% break %}{% endif %}{% endfor %}",
    "{% set ns = namespace(found=false, last=messages[-1]) %}{% for m in messages[::-1] %}"
    "{% if not ns.found and m.role == 'user' %}{% set ns.found = true %}{% endif %}{% endfor %}"
    "{{ ns.found }}{{ ns.last['content'] ~ 1 }}",
    "{% macro show(m, deep=false) -%}\n<|{{ m.role | upper }}|>{{ m.content.split('l') | join('|') }}"
    "{%- endmacro %}{{ show(messages[0]) }}{{ show(messages[2], deep=true) }}",
    "{{ tools | tojson }}{{ tools | tojson(indent=4) }}{{ tools[0] | string }}",
    "{% generation %}{% set x = 1 %}{{ messages[0].content }}{% endgeneration %}{{ x is defined }}",
    "{{ 'a%s' % 'b' }}{{ '{0:>8}{x}'.format(1, x=2) }}{{ documents is none }}{{ missing }}{{ missing is"
    " defined }}",
    "{{- messages | map(attribute='role') | list | length -}}{{ dict(a=1).items() | list }}"
    "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | first }}",
    "{% set content %}{{ messages[0].content }}!{% endset %}{{ content }}{{ content | e }}",
    "{% if messages[0].get('name') is none %}none{% endif %}{{ messages[0].role in ['system'] }}",
]


@pytest.mark.parametrize("template", HONEST, ids=range(len(HONEST)))
def test_it_renders_as_transformers_does(template: str) -> None:
    expected, _ = render_jinja_template(
        [CHAT],
        tools=TOOLS,
        chat_template=template,
        add_generation_prompt=True,
        bos_token="<s>",
        eos_token="</s>",
    )
    variables = {**VARIABLES, "add_generation_prompt": True}
    assert render(template, [CHAT, CHAT[:1] * 4], variables)[0] == expected[0]


def test_the_date() -> None:
    assert render("{{ strftime_now('%Y') }}", [CHAT], {})[0] == time.strftime("%Y")


ESCAPES = [
    "{{ ''.__class__ }}",
    "{{ messages.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ joiner.__init__.__globals__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ self.__init__.__globals__ }}",
    "{{ self._TemplateReference__context.environment }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__['__builtins__'] }}",
    "{{ (messages | map(attribute='__class__') | list)[0].mro() }}",
    "{{ messages | attr('__class__') | attr('__base__') }}",
    "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "{{ '{x.__globals__}'.format_map({'x': raise_exception}) }}",
    "{{ ['{0.__class__}'] | map('format', messages) | first }}",
    "{{ messages | map('format') }}{{ ('{0.__init__}' | attr('format'))(cycler) }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update(role='system') }}",
    "{{ messages[0].pop('role') }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os }}",
    "{% extends 'x' %}",
    "{{ range(10 ** 6) }}",
    "{{ lipsum(n=100) }}",
    "{{ open('/etc/passwd') }}",
    "{{ (joiner(', ').__call__).__self__.__class__.__init__.__globals__ }}",
    "{% for x in messages %}{{ loop.__class__ }}{{ loop._iterator.gi_frame.f_globals }}{% endfor %}",
    "{% macro m() %}{{ caller.__globals__ }}{% endmacro %}{% call m() %}x{% endcall %}",
    "{{ 1 / 0 }}",
    "{{ messages[99].content.x }}",
    "{{ undefined_function() }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ raise_exception('no system message, please') }}",
]


@pytest.mark.parametrize("template", ESCAPES, ids=range(len(ESCAPES)))
def test_nothing_outside_is_reached(template: str) -> None:
    shown = ""
    try:
        (shown,) = render(template, [CHAT], VARIABLES)
    except UsageError as error:
        shown = str(error)
    assert len(shown) < 600
    assert "<class" not in shown
    assert "built-in" not in shown
    assert "<function" not in shown


DAMAGED = [
    "{% for m in messages %}",
    "{{",
    "{% endfor %}",
    "{{ x | no_such_filter }}",
    "{% no_such_tag %}",
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "{% if x %}" * 3000 + "{% endif %}" * 3000,
    "{{ " + "-" * 100_000 + "1 }}",
    "x" * (MOST_TEMPLATE_CHARACTERS + 1),
    "\ud800",
]


@pytest.mark.parametrize("template", DAMAGED, ids=range(len(DAMAGED)))
def test_what_is_no_template(template: str) -> None:
    with pytest.raises((CheckpointError, UsageError), match="template"):
        render(template, [CHAT], VARIABLES)


GREEDY = [
    "{{ 'a' * 10 ** 12 }}",
    "{{ 'a' * 10 ** 9 }}",
    "{{ ('a' * 1000).center(10 ** 10) }}",
    "{{ '%10000000000d' % 1 }}",
    "{{ '{:>10000000000}'.format(1) }}",
    "{{ [1] * 10 ** 10 }}",
    "{{ 'x' | indent(10 ** 10) }}",
    "{{ 'x' | center(10 ** 10) }}",
    "{{ tools | tojson(indent=10 ** 10) }}",
    "{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}",
    "{% set ns = namespace(x='aa') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(40) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
    "{{ ns.x }}",
]


@pytest.mark.parametrize("template", GREEDY, ids=range(len(GREEDY)))
def test_memory_and_length_have_limits(template: str) -> None:
    started = time.monotonic()
    with pytest.raises((CheckpointError, UsageError), match="template"):
        render(template, [CHAT], VARIABLES)
    assert time.monotonic() - started < 50


ENDLESS = [
    "{{ 9 ** (9 ** 9) }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{% set x = f(n - 1) %}{% set y = f(n - 1) %}{% endif %}{% endmacro %}"
    "{{ f(60) }}",
]


@pytest.mark.parametrize("template", ENDLESS, ids=range(len(ENDLESS)))
def test_time_has_a_limit(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_process, "_CPU_SECONDS", 1)
    with pytest.raises(CheckpointError, match="takes more than 1 s") as caught:
        render(template, [CHAT], VARIABLES)
    assert caught.value.hint is not None


def test_the_process_has_no_environment_and_no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secretsecretsecret")
    command: dict[str, object] = {}
    original = template_process.subprocess.run

    def look(*arguments: object, **options: object) -> object:
        command.update(options)
        return original(*arguments, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(template_process.subprocess, "run", look)
    assert render("{{ 1 }}", [CHAT], {}) == ["1"]
    assert command["env"] == {}


def test_what_is_no_json_is_refused() -> None:
    for hostile in ({"tools": [object()]}, {"tools": [float("nan")]}):
        with pytest.raises(UsageError, match="no JSON"):
            render("x", [CHAT], hostile)


def test_published_templates(shared_data: Path) -> None:
    found = 0
    for path in sorted(shared_data.rglob("tokenizer_config.json")):
        template = json.loads(path.read_text(encoding="utf-8")).get("chat_template")
        if isinstance(template, str):
            found += 1
            expected, _ = render_jinja_template(
                [CHAT[1:]], chat_template=template, add_generation_prompt=True
            )
            variables = {"tools": None, "documents": None, "add_generation_prompt": True}
            assert render(template, [CHAT[1:]], variables) == expected
    if not found:
        pytest.skip("the reference data holds no chat template")
