"""A chat template is a stranger's code: whatever it does ends, in one line that says where."""

import json
from pathlib import Path

import pytest

from compose.data import chat_template
from compose.data.chat_template import ChatTemplate
from compose.data.tokenizer import JsonTokenizer
from compose.errors import ConfigError

resource = pytest.importorskip("resource")
CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
LONG = "takes longer than 0.2 seconds"
LARGE = "takes more than 64 MiB of memory"
WIDE = "writes more than 1,000 characters"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    model = {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}
    (folder / "tokenizer.json").write_text(json.dumps(model))
    return folder


@pytest.fixture(autouse=True)
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "_SECONDS", 0.2)
    monkeypatch.setattr(chat_template, "_MEMORY", 1 << 26)
    monkeypatch.setattr(chat_template, "_CHARACTERS", 1000)


def words(folder: Path, template: object) -> str:
    """Return the refusal of a template."""
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": template}))
    before = resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises((ConfigError, ValueError)) as caught:
        ChatTemplate(JsonTokenizer(folder / "tokenizer.json")).text(CHAT, {})
    assert resource.getrlimit(resource.RLIMIT_AS) == before
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value).removeprefix(f"{config}: ").removeprefix("the chat template")


@pytest.mark.parametrize(
    ("template", "line"),
    [
        (
            "\n{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            f", line 2: {LONG}",
        ),
        ("{{ 9 ** (messages|length * 10**9) }}", f", line 1: {LONG}"),
        ("{% for a in range(2000) %}x{% endfor %}", f": {WIDE}"),
        ("\n\n{{ messages[0].content * 10**9 }}", f", line 3: {LARGE}"),
        ("\n{{ ('a' * 10**9)|length }}", f", line 2: {LARGE}"),
        ("{{ '%1000000000d' % messages|length }}", f", line 1: {LARGE}"),
        ("{{ messages[0].content|center(10**9) }}", f", line 1: {LARGE}"),
        (
            "{% set n = namespace(x='aaaa') %}{% for i in range(60) %}\n"
            "{% set n.x = n.x ~ n.x %}{% endfor %}",
            f", line 2: {LARGE}",
        ),
        ("\n\n{{ 1 / 0 }}", ", line 3: ZeroDivisionError: division by zero"),
        ("{{ nope.x }}", ", line 1: 'nope' is undefined"),
        ("\n{{ messages[0].content + 1 }}", ", line 2: TypeError: can only concatenate str"),
        ("{% macro f() %}{{ f() }}{% endmacro %}\n{{ f() }}", ", line 1: RecursionError: maximum"),
        ("{% include 'a' %}", ", line 1: TypeError: no loader for this environment specified"),
        ("{{ strftime_now(5) }}", ", line 1: TypeError: strftime() argument 1 must be str, not int"),
        ("{{ range(10**9) }}", ", line 1: OverflowError: Range too big"),
        ("\n{{ raise_exception('no\\nsystem') }}", ", line 2: no system"),
        ("{{ ''.__class__.__mro__ }}", ", line 1: access to attribute '__class__' of 'str' object"),
        ("{{ '\\ud800' }}", ": 'utf-8' codec can't encode character"),
        ("\n{% if %}", ", line 2: Expected an expression"),
        ("\n{{ a|nope }}", ", line 2: No filter named 'nope'."),
        ("{{ " + "(" * 9000, ": RecursionError: maximum recursion depth exceeded"),
        ("{% for a in [1] %}" * 25 + "{% endfor %}" * 25, ": SyntaxError: too many statically nested"),
    ],
)
def test_a_template_that_cannot_be_used(folder: Path, template: str, line: str) -> None:
    result = words(folder, template)
    assert result.startswith(line), result


@pytest.mark.parametrize("template", [5, {"default": "a"}, [{"name": "default", "template": 5}]])
def test_what_is_no_template(folder: Path, template: object) -> None:
    assert words(folder, template) == "chat_template: is neither a template nor a list of them by name"


@pytest.mark.parametrize("template", [None, [], [5], [{"name": "tools", "template": "a"}]])
def test_no_template(folder: Path, template: object) -> None:
    assert words(folder, template).startswith(f"{folder}: has no chat template, in ")


def test_a_file_that_cannot_be_read(folder: Path) -> None:
    file = folder / "chat_template.jinja"
    file.write_bytes(b"a\xff")
    assert words(folder, "a") == f"{file}: is not UTF-8: byte 1: invalid start byte"
    file.unlink()
    file.mkdir()
    assert words(folder, "a") == f"{file}: cannot be read: is no file"
    file.rmdir()
