"""A command line as keys and values, read out of a shell script.

Variables, arrays, functions and simple conditions are followed, a loop is read once, and nothing is
run.
"""

import ast
import contextlib
import json
import operator
import re
import shlex
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

from compose.errors import whole_number

Leaves = list[tuple[str, Any]]
"""Keys with dots, and their values, in the order of the file. A list is one value."""


def leaves_of(values: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of tables, in their order. Raises ValueError for what is no table."""
    if not isinstance(values, dict):
        raise ValueError("holds no keys, but one value; give a file with keys")
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from leaves_of(value, f"{above}{key}.")
        elif _is_long(value):
            raise ValueError(f"{above}{key}: holds a number out of range")
        else:
            yield f"{above}{key}", value


def _is_long(value: Any) -> bool:
    """Tell whether an integer has more than 64 bits: of a very long one Python makes no text."""
    if isinstance(value, (list, dict)):
        return any(map(_is_long, value.values() if isinstance(value, dict) else value))
    return isinstance(value, int) and value.bit_length() > 64


_COMMENT = re.compile(r"""(?ms)("(?:\\.|[^"\\])*"|'[^']*'|\\.)|(?:^|(?<=[\s;]))#[^\n]*""")
_SUM = re.compile(r"\$\(\(((?:[^()]|\([^()]*\))*)\)\)")
_COMMAND = re.compile(r"\$\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)|`[^`]*`")
_ASSIGN = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_CASE = re.compile(r"\bcase\s+(\S+)\s+in\b((?:(?!\bcase\s).)*?)\besac\b", re.DOTALL)  # no outer one
_EXPAND = re.compile(r"\$\[(?P<sum>[^$\]]*)\]|\$\{(?P<long>[^{}$]*)\}|\$(?P<short>\w+|[@*#?!])")


def _as_ifs(case: re.Match[str]) -> str:
    """Return a case statement as an if, with a test for each pattern."""
    text, word = "if", case[1]
    for branch in case[2].split(";;"):
        patterns, _, commands = branch.partition(")")
        tests = [f"[ {word} = {each.strip()} ]" for each in patterns.strip(" \t\n(").split("|")]
        text += f" {' || '.join(tests)}; then {commands}\nelif" if patterns.strip() else ""
    return f"{text} ; fi"


def _statements(text: str) -> Iterator[tuple[list[str], str]]:
    """Yield the words of each command of a script, and the mark after it, as && or a newline.

    The words of an array are NAME=( and its elements.
    """
    text = _COMMENT.sub(lambda part: part[1] or "", text).replace("\\\n", " ")
    text = _SUM.sub(lambda total: f"$[{''.join(total[1].split())}]", text)
    text = _COMMAND.sub("$command", text)
    while _CASE.search(text):
        text = _CASE.sub(_as_ifs, text)
    lexer = shlex.shlex(text, None, True, "\n;|&()<>")
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t", True, ""
    try:
        tokens = [*lexer]
    except ValueError as error:
        text = f"cannot be read as a shell script: {error}; a config ends in .json, .yaml or .toml"
        raise ValueError(text) from None
    words: list[str] = []
    deep = 0
    for token in tokens:
        if not token or token.strip("\n;|&()<>"):
            words.append(token)
            continue
        if token.startswith(">&") and words[-1:] in (["1"], ["2"]):
            words.pop()
        for mark in token:
            if mark == "(" and words and words[-1].endswith("="):
                words[-1], deep = f"{words[-1]}(", deep + 1
            elif mark == ")" and deep:
                deep -= 1
            if not deep and words:
                yield words, token.strip()
                words = []
    yield words, ""


_OPERATIONS: dict[type, Callable[[int, int], int]] = {ast.Add: operator.add, ast.Sub: operator.sub}
_OPERATIONS |= {ast.Mult: operator.mul, ast.Div: operator.floordiv, ast.Mod: operator.mod}


def _computed(sum: ast.expr) -> int:
    """Return the value of a shell's arithmetic. Raises KeyError for any other expression."""
    match sum:
        case ast.Constant(value=int(number)):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_computed(operand)
        case ast.BinOp(left=left, op=op, right=right):
            return _OPERATIONS[type(op)](_computed(left), _computed(right))
    raise KeyError(ast.unparse(sum))


_WHOLE = re.compile(r"-?\d{1,18}")
_NUMBERS = {f"-{name}": getattr(operator, name) for name in ("eq", "ne", "gt", "ge", "lt", "le")}


class _Shell(dict[str, str]):
    """The variables of a script, and what they give a word.

    One whose value is not known is a null character and its name, with a bracket between if it is set.
    """

    arguments: Sequence[str] = ()
    """Those of the function that runs. The script itself has none."""

    def expanded(self, text: str) -> str:
        for _ in range(20):  # a name may stand inside of another's default
            text, count = _EXPAND.subn(self._value, text)
            if not count:
                break
        return text

    def _value(self, match: re.Match[str]) -> str:
        if match["sum"] is not None:
            total = re.sub(r"[A-Za-z_]\w*", lambda name: self._named(name[0]), match["sum"])
            if not re.fullmatch(r"[\d+*/()%-]{1,80}", total) or "**" in total:
                return f"\0({match['sum']})"
            with contextlib.suppress(SyntaxError, ArithmeticError, KeyError):
                return str(_computed(ast.parse(total, mode="eval").body))
        name, rule, other = match["short"] or match["long"] or "", "", ""
        if parts := re.fullmatch(r"(\w+)(\[[@*]\]|:?[-=+?])(.*)", name, re.DOTALL):
            name, rule, other = parts.groups()
        value = self._named(name)
        if rule[-1:] in ("-", "="):
            return other if value in ("", f"\0{name}") else value
        if rule[-1:] == "+":
            return "" if value in ("", f"\0{name}") else other
        return "" if rule[:1] == "[" and value == f"\0{name}" else value

    def _named(self, name: str) -> str:
        if name[:1] in ("@", "*"):  # ${@:2} is from the second one on
            return " ".join(self.arguments[max(0, whole_number(name[2:]) - 1) :])
        if name == "#":
            return str(len(self.arguments))
        if 0 < whole_number(name) <= len(self.arguments):
            return self.arguments[int(name) - 1]
        return self.get(name, f"\0{name}")

    def holds(self, words: Sequence[str]) -> bool | None:
        """Return whether a condition holds; None if that cannot be known."""
        brackets = words[:1] in (["test"], ["["], ["[["]) or words[-1:] == ["]]"]
        words = [self.expanded(word) for word in words if word not in ("[", "[[", "]", "]]")]
        words = [re.sub(r"\0\d+", "", word) for word in words]  # an argument that is not given
        if any("\0(" in word for word in words):
            return None
        words = words[words[:1] == ["test"] :]
        negated = words[:1] == ["!"]
        match words[negated:]:
            case ["-z" | "-n" as sign, text]:
                result = (text == "" or "\0" in text) == (sign == "-z")
            case [left, ("=" | "==" | "!=") as sign, right] if "\0" not in left + right:
                result = fnmatchcase(left, right) == (sign != "!=")
            case [left, sign, right] if sign in _NUMBERS and all(map(_WHOLE.fullmatch, (left, right))):
                result = _NUMBERS[sign](int(left), int(right))
            case [text] if brackets or text in ("true", "false"):
                result = text != "" and "\0" not in text and (brackets or text == "true")
            case _:
                return None
        return result != negated

    def enters(self, word: str, words: Sequence[str]) -> bool | None:
        """Return whether the body of a loop runs; None if it is not known how often, or with what."""
        if word in ("while", "until"):
            answer = self.holds(words)
            if answer == (word == "until"):
                return False
            return True if words in (["true"], [":"]) else None
        values = [self.expanded(each) for each in words[2:] or ["$@"]]
        values = [part for value in values for part in value.split()]
        known = bool(words) and len(values) < 2 and not set("*?[{\0") & set("".join(values))
        if words:
            self[words[0]] = values[0] if known and values else f"\0({words[0]})"
        return bool(values) if known else None


_LOOPS = ("for", "while", "until", "select")
_KEYWORDS = ("if", "then", "elif", "else", "fi", "do", "done", "{", "export", "declare", "local")
_KEYWORDS += ("readonly", *_LOOPS)
_TESTS = (["["], ["[["], ["test"])
_CALLS = 20  # of a function that are followed
_LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "python", "python3")
_Statement = tuple[list[str], str]
_Statements = list[_Statement]


def _functions(statements: Iterable[_Statement]) -> tuple[_Statements, dict[str, _Statements]]:
    """Return the statements outside of functions, and those of each function by its name."""
    outside, bodies = _Statements(), dict[str, _Statements]()
    name, deep, opens = "", 0, False
    for words, mark in statements:
        names = words[words[:1] == ["function"] :]
        begins = names != words or (mark[:2] == "()" and re.fullmatch(r"[\w.-]+", " ".join(words)))
        if names and begins and not deep:
            name, *words = names
            opens = True
        if not words:
            continue
        if opens and words[0] == "{":
            bodies[name], words, deep = _Statements(), words[1:], 1
        elif deep:
            deep += (words[0] == "{") - (words[0] == "}")
        opens = False
        if words and words[0] != "}":
            (bodies[name] if deep else outside).append((words, mark))
    return outside, bodies


def command_line(text: str) -> Leaves:
    """Return the flags of the longest command in a script, or in a text of flags alone, with values.

    What cannot be followed is there too: a condition as ``if``, of which what needs it to hold is left
    out, a loop as ``loop``, another script as ``source``.
    """
    outside, bodies = _functions(_statements(text))
    shell, commands, unknown, called = _Shell(), list[list[str]](), Leaves(), list[str]()
    branches: list[str] = []  # of each open if: "before" the branch that is taken, "in" it, "after" it
    held, mark, asks = True, "", False  # whether the last command succeeded; what follows; after "if"
    counts = False  # whether this is in the brackets of for ((i=0; ...))
    frames = list[tuple[Sequence[str], str]]()  # of each function that runs: what holds after it
    left = deque(outside)
    while left:
        words, following = left.popleft()
        if following == "return":
            shell.arguments, mark = frames.pop()
            continue
        runs = {"&&": held, "||": not held}.get(mark, True)
        part, mark = mark in ("&&", "||") and words[-1:] == ["]]"], following
        while words and words[0] in _KEYWORDS:
            word, words = words[0], words[1:]
            asks = word in ("if", "elif") or (asks and word not in ("then", "else", "fi"))
            if word in _LOOPS:
                entered = shell.enters(word, words) if {*branches} <= {"in"} else True
                branches.append("after" if entered is False else "in")
                unknown += [("loop", " ".join([word, *words]))] if entered is None else []
                counts = word == "for" and not words
                words = words if word in ("while", "until") and words[:1] not in _TESTS else []
            elif word == "if":
                branches.append("before")
            elif word in ("fi", "done"):
                branches = branches[:-1]
            elif branches[-1:] == ["in"] and word in ("elif", "else"):
                branches[-1] = "after"
            elif branches[-1:] == ["before"] and (word == "else" or (word == "then" and held)):
                branches[-1] = "in"
        around = branches[:-1] if asks and branches[-1:] == ["before"] else branches
        if not runs or not words or any(branch != "in" for branch in around):
            continue
        held = True
        if asks or part or words[:1] in _TESTS:
            if (answer := shell.holds(words)) is None:
                unknown.append(("if", " ".join(words)))
            held = bool(answer)
            continue
        while words and (match := _ASSIGN.match(words[0])):
            name, more, value = match.groups()
            given, words = (words[1:], []) if value == "(" else ([value], words[1:])
            text = f"\0({name})" if counts else " ".join(map(shell.expanded, given))
            between = " " if value == "(" else ""
            shell[name] = f"{shell.get(name, '')}{between}{text}" if more else text
        counts = counts and following[:1] != ")"
        words = [part for word in words for part in _parts(word, shell.expanded(word))]
        if words[:1] in (["source"], ["."]):
            unknown.append(("source", " ".join(words[1:])))
        elif words[:1] == ["shift"]:
            shell.arguments = shell.arguments[max(1, whole_number(words[-1])) :]
        elif words and words[0] in bodies and called.count(words[0]) < _CALLS:
            called.append(words[0])
            frames.append((shell.arguments, mark))
            shell.arguments, mark = words[1:], ""
            left.extendleft(reversed([*bodies[words[0]], ([], "return")]))
        else:
            commands.append(words)
    commands += [value.split() for value in shell.values()]
    best = max(commands, key=lambda words: sum(word.startswith("--") for word in words), default=[])
    alone = [f for f, body in bodies.items() if any(_starts(words) for words, _ in body)]
    alone = [f for f in alone if f not in called and not _starts(best)]
    if alone:
        if len(alone) == 1:
            return command_line(f"{text}\n{alone[0]}")
        why = "nothing that can be followed calls these functions; write the command alone"
        raise ValueError(f"{', '.join(alone)}: {why}")
    flags, conditions = _flags(best), [value for key, value in unknown if key == "if"]
    if conditions and not flags:
        why = "cannot be followed, and no command stands outside of it; write the command alone"
        raise ValueError(f"if {conditions[0]}: {why}")
    return [*flags, *dict.fromkeys(unknown)]


def _starts(words: Sequence[str]) -> bool:
    """Tell whether a command starts a program that may train."""
    return any(word.endswith(".py") or word in _LAUNCHERS for word in words)


def _parts(word: str, value: str) -> list[str]:
    return [word] if word == value else value.split()


def _flags(words: Sequence[str]) -> Leaves:
    """Return the flags among words; one without a value is True, and one with several is a list.

    A value may be JSON, as '{"min_lr": 1e-6}': its keys stand after the flag and a dot.
    Flags before the script's name are the launcher's: ``launcher.--nnodes``.
    """
    flat = [part for word in words for part in (word.split() if word.startswith("--") else [word])]
    script = next((i for i, word in enumerate(flat) if word.endswith(".py")), -1)
    taken: dict[str, list[str]] = {}
    given: list[tuple[str, list[str]]] = []
    for i, word in enumerate(flat):
        if word.startswith("--") and len(word) > 2:
            flag, equals, value = word.partition("=")
            given.append((f"launcher.{flag}" if i < script else flag, [value] if equals else []))
        elif i == script or word.strip("();&|<>") in ("", "done", "fi"):
            given.append(("", []))
        elif given:
            given[-1][1].append(word)
    for flag, values in given:
        if taken.get(flag, values) != values and flag:
            both = f"{' '.join(taken[flag])} and {' '.join(values)}"
            raise ValueError(f"{flag}: stands twice, with {both}; remove one of them")
        taken[flag] = values
    return list(leaves_of({flag: _typed(values) for flag, values in taken.items() if flag}))


def _typed(values: Sequence[str]) -> Any:
    results = [_scalar(value.strip("'\"")) for value in values]
    return True if not results else results[0] if len(results) == 1 else results


def _scalar(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (json.loads,) if text.startswith("{") else (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


def shown(value: Any) -> str:
    """Return a value of a file for a message, short."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    text = text.replace("\0", "$")
    return text if len(text) <= 60 else f"{text[:57]}..."


def unset(value: Any) -> str:
    """Return the variable that a value needs and the script does not set; "" if there is none."""
    match = re.search("\0\\(?(\\w*)", value) if isinstance(value, str) else None
    return f"${match[1]}" if match else ""
