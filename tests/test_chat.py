"""Chat templates: found, rendered as transformers does, and kept from everything else."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from wscope_jax import chat
from wscope_jax.chat import ChatTemplate
from wscope_jax.errors import CheckpointError, MachineError, UsageError

pytest.importorskip("jinja2")

USER = [{"role": "user", "content": "Hello"}]
CHATML = """{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""


def write(folder: Path, **config: Any) -> Path:
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def render(folder: Path, template: str, conversation: Any = USER) -> str:
    write(folder, chat_template=template, bos_token="<s>", eos_token={"content": "</s>"})
    return ChatTemplate.from_dir(folder).render([conversation], ["prompt"])[0]


def test_a_usual_template(tmp_path: Path) -> None:
    talk = [{"role": "system", "content": "Be brief."}, *USER]
    assert render(tmp_path, CHATML, talk) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}", "<s>Hello</s>"),
        ("{{ messages | tojson }}", '[{"role": "user", "content": "Hello"}]'),
        ("{{ '<ä>' | tojson }}", '"<ä>"'),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% generation %}{{ messages[0].role }}{% endgeneration %}", "user"),
        ("{% set ns = namespace(n=0) %}{% set ns.n = ns.n + 1 %}{{ ns.n }}", "1"),
        ("{{ strftime_now('%%') }}", "%"),
        ("{% if tools %}x{% endif %}{% if documents is none %}y{% endif %}", "y"),
        ("  {% if true %}\na\n  {% endif %}\nb", "a\nb"),
    ],
)
def test_what_published_templates_use(tmp_path: Path, template: str, expected: str) -> None:
    assert render(tmp_path, template) == expected


def test_where_a_template_is_found(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    write(tmp_path, chat_template=named)

    def text(name: str | None = None) -> str:
        return ChatTemplate.from_dir(tmp_path, name).render([USER], ["prompt"])[0]

    assert (text(), text("default"), text("tool_use")) == ("d", "d", "t")
    with pytest.raises(UsageError, match=r"--chat-template 'none'.*'default', 'tool_use'"):
        text("none")
    (tmp_path / "chat_template.jinja").write_text("file")
    assert (text(), text("tool_use")) == ("file", "t")
    write(tmp_path, chat_template=named[1:])
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(UsageError, match="'tool_use'"):
        text()


def test_12_a_base_model_has_none(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"no chat template.*no --chat, no messages"):
            ChatTemplate.from_dir(tmp_path)
        write(tmp_path, bos_token="x")
    with pytest.raises(CheckpointError, match="no such directory"):
        ChatTemplate.from_dir(tmp_path / "none")


@pytest.mark.parametrize("found", [3, {}, [3], [{"name": "default"}], {"name": 1, "template": "x"}])
def test_entries_of_another_form(tmp_path: Path, found: Any) -> None:
    write(tmp_path, chat_template=found)
    with pytest.raises(CheckpointError, match="chat_template holds"):
        ChatTemplate.from_dir(tmp_path)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    file = tmp_path / "chat_template.jinja"
    file.write_bytes(b"ab\xff")
    with pytest.raises(CheckpointError, match="byte 2"):
        ChatTemplate.from_dir(tmp_path)
    file.write_bytes(b"x" * ((1 << 20) + 1))
    with pytest.raises(CheckpointError, match="1 MiB"):
        ChatTemplate.from_dir(tmp_path)


def test_12_a_wrong_template_is_named_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"is wrong in line 3: .*endfor"):
        render(tmp_path, "a\n\n{% endfor %}")


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ ''|attr('__class__') }}",
        "{{ cycler.__init__.__globals__.os.system('id') }}",
        "{{ self.__init__.__globals__ }}",
        "{{ lipsum.__globals__['os'].popen('id').read() }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__globals__.json }}",
        "{{ strftime_now.__code__.co_consts }}",
        "{{ (''|attr('format'))('{0.__class__}', 1) }}",
        "{{ '{0.__class__.__init__.__globals__}'.format(raise_exception) }}",
        "{{ ['{0.__class__}']|map('format', raise_exception)|list }}",
        "{% set f = '{0.__globals__}'.format %}{{ f(raise_exception) }}",
        "{{ ('{0.__globals__}'|attr('format'))(raise_exception) }}",
        "{{ '{x.__globals__}'.format_map({'x': raise_exception}) }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ messages.clear() }}",
        "{% set _ = messages[0].__setitem__('role', 'x') %}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{{ open('/etc/passwd').read() }}",
        "{{ config.items() }}",
        "{{ request }}{{ joiner.__init__.__builtins__ }}",
        "{{ (1).__class__ }}{{ namespace.__init__.__globals__ }}",
    ],
)
def test_nothing_gets_out_of_the_sandbox(tmp_path: Path, template: str) -> None:
    """Refused, or rendered to nothing of interest; never a class, a global or a file."""
    try:
        text = render(tmp_path, template)
    except CheckpointError:
        return
    for word in ("class", "function", "root:", "uid=", "globals", "module", "{'"):
        assert word not in text, text


def test_an_escape_cannot_write(tmp_path: Path) -> None:
    """Were the sandbox broken, the process still could write no file: the limit of its files is 0 bytes."""
    program = f"""
import resource, sys
sys.path.insert(0, {str(chat.WORKER.parent)!r})
import chat_worker
def escape(*_):
    open({str(tmp_path / "marker")!r}, "w").write("x")
chat_worker.render = escape
chat_worker.main()
"""
    request = {
        "template": "",
        "variables": {},
        "deadline_s": 1,
        "conversations": [{"variables": {}, "most": 1}],
    }
    done = subprocess.run(
        [sys.executable, "-P", "-c", program],
        input=json.dumps(request).encode(),
        capture_output=True,
        check=False,
    )
    assert done.returncode != 0
    marker = tmp_path / "marker"
    assert not marker.exists() or not marker.read_bytes()


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro m(n) %}{% for i in range(30) %}{{ m(n + 1) if n < 20 }}{% endfor %}{% endmacro %}{{ m(0) }}",
        "{{ 9 ** (9 ** 9) }}",
    ],
)
def test_12_a_loop_without_end_has_a_second(
    tmp_path: Path, template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat, "DEADLINE_S", 0.3)
    began = time.monotonic()
    with pytest.raises(CheckpointError, match=r"did not end within 0\.3 s"):
        render(tmp_path, template)
    assert time.monotonic() - began < 10


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}{{ 'x' * 100 }}{% endfor %}",
        "{{ 'x' * 3000000 }}",
        "{{ 'x' * 10 ** 10 }}",
        "{{ messages[0].content * 10 ** 7 }}",
        "{% set ns = namespace(a='x') %}{% for i in range(99) %}{% set ns.a = ns.a + ns.a %}{% endfor %}",
        "{{ '%999999999d' % 1 }}",
        "{{ [0] * 10 ** 9 }}",
    ],
)
def test_12_output_without_end_is_refused(tmp_path: Path, template: str) -> None:
    # Which limit is met first, of size, memory or time, depends on how busy the machine is.
    with pytest.raises(CheckpointError, match=r"more than 4 times|failed|did not end within"):
        render(tmp_path, template)


def test_the_cap_grows_with_the_input(tmp_path: Path) -> None:
    long = [{"role": "user", "content": "x" * (1 << 20)}]
    assert len(render(tmp_path, "{{ messages[0].content * 4 }}", long)) == 4 << 20
    with pytest.raises(CheckpointError, match="more than 4 times"):
        render(tmp_path, "{{ messages[0].content * 6 }}", long)


@pytest.mark.parametrize(
    "template", ["{{ 1 / 0 }}", "{{ nothing.at.all }}", "{{ 'a' + 1 }}", "{{ messages() }}"]
)
def test_other_errors_of_a_template(tmp_path: Path, template: str) -> None:
    with pytest.raises(CheckpointError, match="the chat template failed"):
        render(tmp_path, template)


@pytest.mark.parametrize("depth", [200, 100_000])
def test_deep_templates(tmp_path: Path, depth: int) -> None:
    with pytest.raises(CheckpointError, match="the chat template"):
        render(tmp_path, "{{ " + "(" * depth)


def test_a_template_refuses_a_conversation(tmp_path: Path) -> None:
    write(tmp_path, chat_template="{{ raise_exception('roles\\nmust alternate') }}")
    with pytest.raises(UsageError, match=r"^line 7: .*refuses this: roles must alternate$"):
        ChatTemplate.from_dir(tmp_path).render([USER], ["line 7"])


def test_many_conversations_need_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, chat_template="{{ messages[0].content }}")
    run, calls = subprocess.run, []
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: calls.append(1) or run(*a, **k))
    talks = [[{"role": "user", "content": f"é{i}\ud800"}] for i in range(50)]
    names = list(map(str, range(50)))
    assert ChatTemplate.from_dir(tmp_path).render(talks, names) == [
        f"é{i}\ud800" for i in range(50)
    ]
    assert calls == [1]


@pytest.mark.parametrize("found", [None, "3.1.5", "2.11.3"])
def test_jinja_is_missing_or_too_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: str | None
) -> None:
    package = tmp_path / "lib" / "jinja2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        f"__version__ = {found!r}" if found else "raise ImportError"
    )
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    with pytest.raises(MachineError, match=r"3\.1\.6.*wscope-jax\[chat\]"):
        render(tmp_path, "x")


def test_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "run", refuse)
    with pytest.raises(MachineError, match="ulimit -u"):
        render(tmp_path, "x")
