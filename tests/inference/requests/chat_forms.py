"""Chat templates in the forms that families have; written for these tests."""

_TURNS = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
)
_NO_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
)
_BY_TURNS = (
    "{% for m in messages %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('user and assistant have to take turns') }}{% endif %}{% endfor %}"
)
FORMS: dict[str, str] = {
    # Marks around each turn; one for all roles.
    "chatml": _TURNS + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    # The same, with a system message where none is given.
    "chatml with a system of its own": (
        "{% if messages[0].role != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}"
        + _TURNS
        + "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ),
    # The system message within the first turn of the user; the beginning of text in the template.
    "inst with sys": (
        "{% set loop_messages = messages %}{% set system = '' %}"
        "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
        "{% set system = '<<SYS>>\n' + messages[0]['content'] + '\n<</SYS>>\n\n' %}{% endif %}"
        "{% for m in loop_messages %}"
        "{% set content = (system if loop.first else '') + m['content'] %}"
        "{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
        "{% elif m['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}"
        "{% endif %}"
        "{% endfor %}"
    ),
    # The same without a system role, which is refused.
    "inst that takes turns": (
        "{{ bos_token }}" + _NO_SYSTEM + _BY_TURNS + "{% for m in messages %}"
        "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
        "{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
    ),
    # Heads with names of roles, a date, and content without space around it.
    "headers with a date": (
        "{{- bos_token }}\n{%- if not date_string is defined %}{%- set date_string = '26 Jul' %}"
        "{%- endif %}\n{%- if messages[0]['role'] == 'system' %}"
        "{%- set system = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}"
        "{%- else %}{%- set system = '' %}{%- endif %}\n"
        "{{- '<|head|>system<|end|>\n\nToday: ' + date_string + '\n\n' + system + '<|eot|>' }}\n"
        "{%- for m in messages %}"
        "{{- '<|head|>' + m['role'] + '<|end|>\n\n' + m['content'] | trim + '<|eot|>' }}"
        "{%- endfor %}{%- if add_generation_prompt %}"
        "{{- '<|head|>assistant<|end|>\n\n' }}{%- endif %}"
    ),
    # Another name for the assistant; parts of text as content.
    "turns of a model": (
        "{{ bos_token }}" + _NO_SYSTEM + "{%- macro text(m) -%}{%- if m.content is string -%}"
        "{{ m.content | trim }}{%- else -%}{%- for part in m.content -%}"
        "{%- if part.type == 'text' -%}{{ part['text'] | trim }}{%- endif -%}{%- endfor -%}"
        "{%- endif -%}{%- endmacro -%}"
        "{% for m in messages %}{% set role = 'model' if m.role == 'assistant' else m.role %}"
        "{{ '<start_of_turn>' + role + '\n' + text(m) + '<end_of_turn>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
    ),
    # A tag for each role, and an end of text behind the last of them.
    "role tags": (
        "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}"
        "{% else %}{{ eos_token }}{% endif %}"
    ),
    # Plain words, and a loop that is left.
    "words": (
        "{% for m in messages %}{% if m.role == 'stop' %}{% break %}{% endif %}"
        "{% if m.role == 'system' %}{{ m.content }}\n\n{% continue %}{% endif %}"
        "{{ 'USER: ' if m.role == 'user' else 'ASSISTANT: ' }}{{ m.content }}"
        "{{ ' ' if m.role == 'user' else eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
    ),
    # Thoughts, which are left out of all turns but the last; an argument that turns them off.
    "thinking": (
        "{%- set ns = namespace(last=-1) %}{%- for m in messages %}{%- if m.role == 'user' %}"
        "{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
        "{%- for m in messages %}{%- set content = m.content %}"
        "{%- if m.role == 'assistant' and '</think>' in content %}"
        "{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
        "{{- '<|im_start|>' + m.role + '\n' }}"
        "{%- if m.reasoning_content and loop.index0 > ns.last %}"
        "{{- '<think>\n' + m.reasoning_content.strip('\n') + '\n</think>\n\n' }}{%- endif %}"
        "{{- content + '<|im_end|>\n' }}{%- endfor %}{%- if add_generation_prompt %}"
        "{{- '<|im_start|>assistant\n' }}"
        "{%- if enable_thinking is defined and enable_thinking is false %}"
        "{{- '<think>\n\n</think>\n\n' }}{%- endif %}{%- endif %}"
    ),
    # Tools and documents, which are not given; JSON, and a dict made in the template.
    "tools left out": (
        "{%- if tools %}{{- 'Tools: ' + tools | tojson }}\n{%- endif %}"
        "{%- if documents is not none %}{{- 'Documents' }}{%- endif %}"
        "{%- set names = dict(user='User', assistant='Bot', system='Sys') %}"
        "{%- for m in messages %}{{- names[m.role] + ': ' + m.content | tojson + '\n' }}"
        "{%- if m.tool_calls is defined %}{{- m.tool_calls | tojson(indent=2) }}{%- endif %}"
        "{%- endfor %}{%- if add_generation_prompt %}{{- 'Bot: ' }}{%- endif %}"
    ),
    # What an answer is trained on, between tags; blocks on lines of their own.
    "generation tags": (
        "{% for m in messages %}\n    {% set mark = 'A' %}\n    {% if m.role == 'assistant' %}\n"
        "{% generation %}{% set mark = 'B' %}{{ m.content }}{{ eos_token }}{% endgeneration %}\n"
        "    {% else %}\n[{{ m.role }}] {{ m.content }} {{ mark }}\n    {% endif %}\n"
        "{{ mark }}{% endfor %}\n{% if add_generation_prompt %}\n[assistant]{% endif %}"
    ),
    # Upper case and numbers of turns; nothing behind them, whatever is asked for.
    "numbered": (
        "{{ bos_token }}{% for m in messages if m.content %}"
        "{{ loop.index }}. {{ m.role | upper }}: {{ m.content | replace('\n', ' ') }}\n{% endfor %}"
    ),
}
