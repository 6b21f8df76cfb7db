"""Chats written as text by a tokenizer's template, which is code from a stranger and has limits."""

import contextlib
import datetime
import json
import resource
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from compose.data.chat_messages import ChatMessage
from compose.data.special_tokens import CONFIG, read_beside
from compose.data.tokenizer import JsonTokenizer
from compose.errors import ConfigError, or_say, read_file, refuse_link_out

# Limits for writing one chat, far above normal use: a template is code that comes with a download.
_SECONDS = 10.0
_MEMORY = 1 << 30  # bytes
_CHARACTERS = 1 << 26
_DEFAULT, _WITH_TOOLS = "default", "tool_use"
_FOLDER = "additional_chat_templates"


class TooLong(BaseException):
    """The error for code that takes too long; it is no Exception, which the code might catch."""


@contextlib.contextmanager
def _time() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGPROF, _stop)
    try:
        # Repeat each second: an exception raised within a finalizer is lost.
        signal.setitimer(signal.ITIMER_PROF, _SECONDS, 1.0)
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _stop(number: int, frame: FrameType | None) -> None:
    raise TooLong


@contextlib.contextmanager
def _memory(more: int) -> Iterator[None]:
    statistics = Path("/proc/self/statm")
    if not statistics.exists():
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(statistics.read_text().split()[0]) * resource.getpagesize()
    limit = used + more if soft == resource.RLIM_INFINITY else min(used + more, soft)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


class ChatTemplate:
    """The chat template of a tokenizer, from chat_template.jinja or tokenizer_config.json beside it.

    There may be several by name: "tool_use" writes chats with tools, and "default" the others.
    """

    def __init__(self, tokenizer: JsonTokenizer) -> None:
        self._pieces: list[str] = []
        self._marks: list[tuple[int, str]] = []
        self._tags: list[int] = []  # their lines, in the template that is compiled
        environment = self._environment()
        self._templates: dict[str, Any] = {}
        self._tagged: set[str] = set()
        if not (sources := _sources(tokenizer.path.parent, tokenizer.config)):
            raise ConfigError(
                f"{tokenizer.path.parent}: has no chat template, in chat_template.jinja or"
                " tokenizer_config.json"
            )
        for name, (path, source) in sources.items():
            self._tags.clear()
            try:
                with _time(), _memory(_MEMORY):
                    self._templates[name] = environment.from_string(source)
            except (Exception, TooLong) as error:  # compiling to Python may fail in many ways
                raise ConfigError(f"{path}: the chat template{_reason(error)}") from None
            if self._tags:
                self._tagged.add(name)
        self.special = tokenizer.special

    def _environment(self) -> Any:
        from jinja2.ext import Extension, loopcontrols
        from jinja2.nodes import CallBlock, Node
        from jinja2.parser import Parser
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        pieces, marks, tags = self._pieces, self._marks, self._tags

        class Generation(Extension):
            """The tag {% generation %}: it marks what is learnt of a chat."""

            tags = {"generation"}  # noqa: RUF012

            def parse(self, parser: Parser) -> Node:
                """Return a node that writes what stands in the tag, and remembers where."""
                tags.append(line := next(parser.stream).lineno)
                body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
                return CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

            def _mark(self, caller: Callable[[], str]) -> str:
                written = caller()
                marks.append((sum(map(len, pieces)), written))
                return written

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
        )
        # JSON for a model is not escaped for HTML, as in transformers.
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        return environment

    def text(
        self, messages: Sequence[ChatMessage], more: Mapping[str, Any], prompt: bool = False
    ) -> str:
        """Write one or more messages; with ``prompt`` the text ends with what asks for a reply."""
        name = self._name(more)
        # A template finds None where there are no tools or documents, as in transformers.
        given = {"tools": None, "documents": None, **self.special, **more}
        given |= {"messages": messages, "add_generation_prompt": prompt}
        self._pieces.clear()
        self._marks.clear()
        try:
            with _time(), _memory(_MEMORY):
                size, template = 0, self._templates[name]
                # Not render(): it would build the whole text before its size is known.
                for piece in template.root_render_func(template.new_context(given)):
                    self._pieces.append(piece)
                    size += len(piece)
                    if size > _CHARACTERS:
                        raise ValueError(f"writes more than {_CHARACTERS:,} characters")
                text = "".join(self._pieces)
                text.encode()  # fails for half a character (a lone surrogate)
        except (Exception, TooLong) as error:
            raise ValueError(f"the chat template{_reason(error)}") from None
        return text

    def marked(
        self, messages: Sequence[ChatMessage], more: Mapping[str, Any]
    ) -> list[tuple[int, int]] | None:
        """Return the spans that {% generation %} marks; None if the template has no tag."""
        if self._name(more) not in self._tagged:
            return None
        text = self.text(messages, more)
        for start, written in self._marks:
            if not text.startswith(written, start):
                raise ValueError(
                    "the chat template has {% generation %} in a macro, or in a block whose text is"
                    " kept for later: it is not known what it marks"
                )
        return [(start, start + len(written)) for start, written in self._marks if written]

    def _name(self, more: Mapping[str, Any]) -> str:
        name = _WITH_TOOLS if more.get("tools") and _WITH_TOOLS in self._templates else _DEFAULT
        if name not in self._templates:
            raise ValueError(f"needs a chat template named {name!r}, as it has no tools")
        return name


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(words: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(words)


def _reason(error: BaseException) -> str:
    """Return what went wrong in a template, and in which line."""
    from jinja2 import TemplateError, TemplateSyntaxError

    line = error.lineno if isinstance(error, TemplateSyntaxError) else 0
    trace = error.__traceback__
    while trace:
        # A template runs in Python frames, and jinja2 maps their lines to the template's.
        template = trace.tb_frame.f_globals.get("__jinja_template__")
        line = template.get_corresponding_lineno(trace.tb_lineno) if template else line
        trace = trace.tb_next
    words = " ".join(str(error).split())[:200]
    if isinstance(error, TooLong):
        words = f"takes longer than {_SECONDS:g} seconds"
    elif isinstance(error, MemoryError):
        words = f"takes more than {_MEMORY >> 20:,} MiB of memory"
    elif not isinstance(error, (TemplateError, ValueError)) or not words:
        words = f"{type(error).__name__}: {words}"
    return f", line {line}: {words}" if line else f": {words}"


def has_template(tokenizer: JsonTokenizer) -> bool:
    """Return whether a chat template is beside a tokenizer. Raises ConfigError if it cannot be read."""
    return bool(_sources(tokenizer.path.parent, tokenizer.config))


def template_texts(folder: Path) -> dict[str, str]:
    """Return the text of each chat template in a tokenizer's folder, by name."""
    sources = _sources(folder, read_beside(folder, CONFIG))
    return {name: text for name, (_, text) in sources.items()}


def _sources(folder: Path, values: Mapping[str, Any]) -> dict[str, tuple[Path, str]]:
    """Return the file and the text of each template, by name; ``values`` are the config's."""
    config, named = folder / CONFIG, folder / _FOLDER
    results = values.get("chat_template")
    sources: dict[str, tuple[Path, str]] = {}
    if isinstance(results, list):  # several templates, by name
        each = [one for one in results if isinstance(one, dict) and isinstance(one.get("name"), str)]
        results = {one["name"]: one.get("template") for one in each}
    elif results is not None:
        results = {_DEFAULT: results}
    for name, source in (results or {}).items():
        if not isinstance(source, str):
            raise ConfigError(
                f"{config}: chat_template: is neither a template nor a list of them by name"
            )
        sources[name] = config, source
    refuse_link_out(named, folder)
    files = {path.stem: path for path in sorted(named.glob("*.jinja"))}
    if (folder / "chat_template.jinja").exists():
        files[_DEFAULT] = folder / "chat_template.jinja"
    if files:  # they stand in place of the config's
        sources = {name: (path, _read(path)) for name, path in files.items()}
    return {name: source for name, source in sources.items() if name in (_DEFAULT, _WITH_TOOLS)}


def _read(path: Path) -> str:
    try:
        with or_say(f"{path}: cannot be read"):
            return read_file(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8: byte {error.start}: {error.reason}") from None
