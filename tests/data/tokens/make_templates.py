"""Writes the cases of templates.json, rendered with transformers (last run: 5.23.0, Jinja2 3.1.6): python3 make_templates.py

Each case has a request, which the tests parse, and the conversation into which vLLM converts it, which transformers renders.
"""

import json
import pathlib

import transformers
from transformers.utils.chat_template_utils import render_jinja_template

HERE = pathlib.Path(__file__).parent
USER = [{"role": "user", "content": "hello"}]
TALK = [
    {"role": "system", "content": "  Be terse.\u00a0\n"},
    {"role": "user", "content": "What's “up”? \\ \"q\"\t\u001c"},
    {"role": "assistant", "content": "<think>\nhmm\n</think>\n\nNot much."},
    {"role": "user", "content": "Ünïcode 中文 \U0001f600 </s>"},
]
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "A <b>city</b> & 'more'", "enum": ["Paris", "Zürich"]},
        "days": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 1.5}},
        "z": {"default": None, "flag": True, "tiny": 1e-7, "big": 123456789012345678, "e": {}, "l": []},
    },
    "required": ["city"],
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "Weather\nnow", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "noop", "description": None, "parameters": None}},
]
CALLS = [
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "call_12345",
                "function": {"arguments": {"city": "Zürich", "days": [1, 2], "x": {"b": 1.0, "a": None}}, "name": "get_weather"},
                "type": "function",
            }
        ],
    },
    {"role": "tool", "content": "{\"t\": 21}", "tool_call_id": "call_12345"},
    {"role": "assistant", "content": "It is 21.", "reasoning": "easy", "reasoning_content": "easy"},
    {"role": "user", "content": "Thanks"},
]
CALL_MESSAGES = json.loads(json.dumps(CALLS))
CALL_MESSAGES[1]["content"] = None
CALL_MESSAGES[1]["tool_calls"][0] = {
    "type": "function",
    "id": "call_12345",
    "function": {"name": "get_weather", "arguments": json.dumps(CALLS[1]["tool_calls"][0]["function"]["arguments"])},
}
del CALL_MESSAGES[3]["reasoning"]

CASES = []


def case(name, template, messages=TALK, conversation=None, **options):
    CASES.append({"name": name, "template": template, "request": {"messages": messages, **options}, "conversation": conversation})


case("plain values", "{{ none }}|{{ true }}|{{ 1.0 }}|{{ 7 // 2 }}|{{ 7 / 2 }}|{{ [1, 'a', none, 2.50] }}|{{ {'a': 'it\\'s', 'b': [true]} }}|{{ missing }}|{{ 'x' ~ none ~ 1 ~ false }}")
case("printing dicts and lists", "{{ messages[0] }}{{ tools }}{{ 'x' ~ tools }}{{ tools | string }}{{ tools | length }}", USER, tools=TOOLS)
case("tojson of tools", "{% for t in tools %}{{ t | tojson }}\n{{ t | tojson(indent=4) }}\n{{ t.function | tojson(ensure_ascii=True) }}{{ t | tojson(separators=(',', ':')) }}{{ t | tojson(sort_keys=true, indent=2) }}{% endfor %}", USER, tools=TOOLS)
case("tojson of text", "{% for m in messages %}{{ m.content | tojson }}{{ m.content | tojson(ensure_ascii=true) }}{% endfor %}")
case("white space", "{% for m in messages %}\n  {% if m.role == 'user' %}\n    U:{{ m.content | trim }}\n  {%- elif true -%}   \n  A\n  {%+ endif %}  x  {# note #}\n  {#- note -#}\n y\n{% endfor %}\n\n")
case("strip and split", "{% for m in messages %}[{{ m.content.strip() }}][{{ m.content.lstrip() }}][{{ m.content.rstrip('\\n') }}][{{ m.content.split('</think>')[-1].lstrip('\\n') }}][{{ m.content.split() | tojson }}][{{ m.content.rsplit(' ', 1)[0] }}][{{ m.content.split('\\n', 1) | tojson }}]{% endfor %}")
case("string methods", "{% for m in messages %}{{ m.content.find('e') }} {{ m.content.rfind('e') }} {{ m.content.find('中') }} {{ m.content.count('e') }} {{ m.content.upper() }} {{ m.content.lower() }} {{ m.content.replace('e', 'E', 1) }} {{ m.role.capitalize() }} {{ m.role.title() }} {{ m.content.startswith('  Be') }} {{ m.content.endswith('>') }} {{ ', '.join(['a', m.role]) }} {{ m.role.removeprefix('us') }} {{ m.role.isalpha() }}{{ ''.isdigit() }}{{ '12'.isdigit() }}\n{% endfor %}")
case("slices", "{{ messages[1:] | length }}{{ messages[:-1] | length }}{{ messages[-1].content[:5] }}{{ messages[-1]['content'][-4:] }}{{ messages[::-1][0].role }}{{ 'abc'[1] }}{{ messages[9] is defined }}")
case("tests", "{% set o = {'s': 'x', 'l': [], 'm': {}, 'n': none, 'i': 3, 'f': 2.0, 'b': true} %}{% for k, v in o.items() %}{{ k }}:{{ v is string }}{{ v is sequence }}{{ v is iterable }}{{ v is mapping }}{{ v is none }}{{ v is number }}{{ v is integer }}{{ v is float }}{{ v is boolean }}{{ v is true }}{{ v is defined }}{{ v is sameas none }} {% endfor %}{{ u is defined }}{{ u is string }}{{ u is none }}{{ u is iterable }}{{ u is sequence }}{{ u is mapping }}")
case("dict methods", "{% for t in tools %}{% for k, v in (t.function.parameters or {}).items() %}{{ k }}={{ v }};{% endfor %}{{ t.get('zzz', 'none') }}{{ t.function.keys() | list }}{{ t.values() | list | length }}{% for k in t.function %}{{ k }}{% endfor %}{{ 'name' in t.function }}{{ 'items' in t }}{% endfor %}{% for p in (tools[0].function.parameters.properties.values()) %}{% for k, v in p.items() %}{{ k }}{% if k == 'items' %}{{ v.type }}{% endif %}{% endfor %}{{ p.items() | list }}{% endfor %}", USER, tools=TOOLS)
case("filters", "{{ messages | map(attribute='role') | list }}{{ messages | map(attribute='role') | join(', ') }}{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ messages | rejectattr('role', 'in', ['user']) | map(attribute='content') | map('trim') | join('|') }}{{ [3, 1, 2] | max }}{{ [3, 1] | min }}{{ ['b', 'a'] | reverse | list }}{{ {'b': 1, 'a': 2} | dictsort }}{{ missing | default('d') }}{{ '' | default('e', true) }}{{ none | d('x') }}{{ [1, 'a', none] | join('-') }}{{ 'aXb' | lower }}{{ 'ab' | upper | first }}{{ [1,2] | last }}{{ '5' | int + 1 }}{{ -3 | abs }}{{ 'a-b' | replace('-', '+') }}{{ [1,1,2] | unique | list }}{{ [] | list }}{{ 'ab' | list }}{{ 'tool' | capitalize }}")
case("namespace and backwards loop", "{% set ns = namespace(last=-1, multi=true) %}{% for m in messages[::-1] %}{% set i = (messages | length - 1) - loop.index0 %}{% if ns.multi and m.role == 'user' and not (m.content.startswith('<x>') and m.content.endswith('</x>')) %}{% set ns.multi = false %}{% set ns.last = i %}{% endif %}{% endfor %}{{ ns.last }}{% for m in messages %}{% if loop.index0 > ns.last or loop.first or loop.last %}{{ loop.index }}/{{ loop.length }}{{ loop.revindex0 }}{% endif %}{% if loop.previtem is defined %}<{{ loop.previtem.role }}{% endif %}{% if loop.nextitem %}>{{ loop.nextitem.role }}{% endif %}{% endfor %}")
case("loop controls and else", "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.role }}{% if loop.index > 2 %}{% break %}{% endif %}{% else %}none{% endfor %}{% for x in [] %}{% else %}empty{% endfor %}{% for m in messages if m.role == 'user' %}{{ loop.index }}{{ loop.last }}{% endfor %}")
case("macros", "{%- macro show(d, skip=[], depth=0) -%}\n{%- if d is mapping -%}\n{% for k in d %}{% if k not in skip %}\n{{ '  ' * depth }}<{{ k }}>{{ show(d[k], skip, depth + 1) }}</{{ k }}>{% endif %}{% endfor %}\n{%- elif d is iterable and d is not string -%}{{ d | tojson }}{%- else -%}{{ d | string }}{%- endif -%}\n{%- endmacro -%}\n{{ show(tools[0], ['required']) }}", USER, tools=TOOLS)
case("set blocks and scopes", "{% set x = 1 %}{% for m in messages %}{% set x = x + 1 %}{{ x }}{% endfor %}{{ x }}{% set b %}  body {{ x }}\n{% endset %}[{{ b }}]{% if true %}{% set y = 2 %}{% endif %}{{ y }}{% with z = 3 %}{{ z }}{% endwith %}{{ z is defined }}")
case("chatml with tools", "{%- if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}{%- for m in messages %}{%- if m.role == 'assistant' and m.tool_calls %}<|im_start|>assistant{% if m.content %}\n{{ m.content }}{% endif %}{% for c in m.tool_calls %}{% if c.function is defined %}{% set c = c.function %}{% endif %}\n<tool_call>\n{\"name\": \"{{ c.name }}\", \"arguments\": {{ c.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n{%- elif m.role == 'tool' %}{% if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}\n<r>{{ m.content }}</r><|im_end|>\n{%- else %}<|im_start|>{{ m.role }}\n{{ m.content }}{{ m.reasoning_content }}{{ m.reasoning }}<|im_end|>\n{%- endif %}{%- endfor %}{%- if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}", CALL_MESSAGES, CALLS, tools=TOOLS, chat_template_kwargs={"enable_thinking": False, "unused": 1})
case("whole calls as JSON", "{{ bos_token }}{% for m in messages %}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% for c in m.tool_calls %}{% set out = c.function | tojson %}{{ out[:-1] }}, \"id\": \"{{ c.id }}\"}{% endfor %}{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}", CALL_MESSAGES, CALLS)
case("dates", "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y %A %B %H:%M %j') }}{% endif %}", USER)
case("generation tags", "{% for m in messages %}{% if m.role == 'assistant' %}\n{%- generation -%}\n {{ m.content }} \n{%- endgeneration %}\n!{% else %}{{ m.role }}{% generation %}\n?{% endgeneration %}{% endif %}{% endfor %}")
case("parts", "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% elif p['type'] == 'image' %}<image>{% endif %}{% endfor %}{% endif %}\n{% endfor %}", [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, {"role": "assistant", "content": "c"}, {"role": "tool", "tool_call_id": "x", "content": [{"type": "text", "text": "d"}, {"type": "text", "text": "e"}]}], [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, {"role": "assistant", "content": [{"type": "text", "text": "c"}]}, {"role": "tool", "content": "d\ne", "tool_call_id": "x"}])
case("continued", "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</{{ m.role }}>{% endfor %}", [*USER, {"role": "assistant", "content": " The answer is  "}], add_generation_prompt=False, continue_final_message=True)
case("continued, spaces kept", "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}", [*USER, {"role": "assistant", "content": " The answer is  "}], add_generation_prompt=False, continue_final_message=True)
case("documents and effort", "{{ documents | tojson }}{{ reasoning_effort }}{{ enable_thinking }}{{ add_generation_prompt }}", USER, documents=[{"title": "t", "text": "x"}], reasoning_effort="low")
case("nothing sent", "{{ tools is none }}{{ tools is defined }}{{ documents is none }}{{ reasoning_effort is defined }}{{ bos_token is defined }}{{ sep_token is defined }}", USER)
case("alternation", "{{ bos_token }}{% set loop_messages = messages[1:] if messages[0]['role'] == 'system' else messages %}{% for m in loop_messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}{% set role = 'model' if m['role'] == 'assistant' else m['role'] %}{{ '<start>' + role + '\\n' + m['content'] | trim + '<end>\\n' }}{% endfor %}")


def render(entry):
    request = entry["request"]
    conversation = entry.pop("conversation") or request["messages"]
    kwargs = dict(request.get("chat_template_kwargs") or {})
    if "reasoning_effort" in request:
        kwargs["reasoning_effort"] = request["reasoning_effort"]
        kwargs.setdefault("enable_thinking", request["reasoning_effort"] != "none")
    rendered, _ = render_jinja_template(
        conversations=[conversation],
        chat_template=entry["template"],
        tools=request.get("tools"),
        documents=request.get("documents"),
        add_generation_prompt=request.get("add_generation_prompt", True),
        continue_final_message=request.get("continue_final_message", False),
        bos_token="<s>",
        eos_token="</s>",
        **kwargs,
    )
    return rendered[0]


if __name__ == "__main__":
    import datetime
    import transformers.utils.chat_template_utils as utils

    class Fixed(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2026, 3, 5, 7, 8, 9)

    utils.datetime = Fixed
    rows = [json.dumps({**{k: v for k, v in entry.items() if k != "conversation"}, "expect": render(entry)}, ensure_ascii=False) for entry in CASES]
    (HERE / "templates.json").write_text("[\n" + ",\n".join(rows) + "\n]\n")
    print(transformers.__version__, len(rows))
