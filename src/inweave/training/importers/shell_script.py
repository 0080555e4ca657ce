r"""Commands that a shell script would run, with the values of its variables and lists. Nothing is run.

    NAME=value   export NAME=value   set NAME=value   $name = "value"        a variable
    set /a NAME=10*20   NAME=$((10 * 20))                                    whole numbers
    args=("--a" "b")   args+=("--c $d")   $args = @("--a")                   a list
    $args = [System.Collections.ArrayList]::new()   [void]$args.Add("--a=" + $b)
    if [[ $a == 1 ]]; then ... elif ... else ... fi                          bash; also [ ... ], -n, -z, = and !=
    if ($a) { ... } elseif ($a -eq "b") { ... } else { ... }                 PowerShell; also -ne and -not
    python train.py "${args[@]}"   python train.py $args                     a list in a command
    docker run image bash -c 'python train.py --a b'                         a command in another

A line goes on after a backslash (bash), a caret (cmd) or a backtick (PowerShell), and inside of the brackets of a list.
A branch whose condition is false is skipped. If a condition cannot be read, such as one on a file that exists, a list
that its branch changes is uncertain, and a command that uses the list is refused.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field

from inweave.checked import for_message
from inweave.errors import ConfigError
from inweave.training.importers.powershell import condition_holds, is_powershell, powershell_statements

_CONTINUED = re.compile(r"[ \t]*[\\^`][ \t]*\r?\n")
#: documented commands are often written without a sign that the line goes on
_OPTION_LINE = re.compile(r"[ \t]*(?:[ \t]#[^\n\"']*)?(?:\r?\n[ \t]*)+(?=--[A-Za-z])")
_COMMENT = re.compile(r"^[ \t]*(?:#|::|rem\b|@?echo\b)[^\n]*\n?", re.IGNORECASE | re.MULTILINE)
_ASSIGNMENT = re.compile(
    r"""^\s*(?:export\s+|set\s+(?:/a\s+)?|local\s+|declare\s+|readonly\s+|\$(?:env:)?)?"?([A-Za-z_]\w*)\s*=\s*(?!=)(.*?)\s*$""",
    re.IGNORECASE,
)
_ARITHMETIC = re.compile(r"\$\(\(\s*(.+?)\s*\)\)")
_CALCULATION = re.compile(r"\s*\d{1,15}(?:\s*[-+*/%]\s*\d{1,15}){0,20}\s*")
_BARE = re.compile(r"\$?\{?([A-Za-z_]\w*)\}?")
_VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*)(?::-([^}]*))?\}|\$(?:env:)?([A-Za-z_]\w*)|%([A-Za-z_]\w*)%")
UNSET_VARIABLE = re.compile(r"\$\{?(?:env:)?[A-Za-z_]\w*[^}\s]*\}?|%[A-Za-z_]\w*%|\$\(|\$\d")
_BASH_LIST = re.compile(r"^\s*(?:local\s+|declare\s+(?:-a\s+)?)?([A-Za-z_]\w*)(\+?)=\((.*)\)\s*(?:#.*)?$", re.DOTALL)
_OPEN_LIST = re.compile(r"^\s*(?:local\s+|declare\s+(?:-a\s+)?)?[A-Za-z_]\w*\+?=\((?!.*\)\s*$)")
_POWERSHELL_LIST = re.compile(
    r"^\s*\$([A-Za-z_]\w*)\s*(\+?)=\s*(@\(.*\)|\[[\w.]*(?:ArrayList|List)[^\]]*\]::new\(\))\s*$"
)
_POWERSHELL_ADD = re.compile(r"^\s*(?:\[void\]\s*)?\$([A-Za-z_]\w*)(?:\.Add\((.*?)\)\s*(?:\|.*)?|\s*\+=\s*(.*))$")
_OPERATION = re.compile(r"^[^\"']*(?:\s-[A-Za-z]+\s|\.\w+\(|\|)")
_QUOTED = re.compile(r"""^(?:"[^"]*"|'[^']*')\s*(?:#.*)?$""")
_LIST_WORD = re.compile(r"^\"?(?:\$\{([A-Za-z_]\w*)\[[@*]\]\}|[$@]([A-Za-z_]\w*))\"?$")
_BASH_IF = re.compile(r"^\s*(if|elif)\s+(.*?)\s*;?\s*then\b\s*(.*)$")
_POWERSHELL_IF = re.compile(r"^\s*(?:\}\s*)?(if|elseif)\s*\((.*)\)\s*\{\s*(.*)$", re.IGNORECASE | re.DOTALL)
_POWERSHELL_BLOCK = re.compile(r"^(?!(?:if|else|elseif)\b)[^}].*\{$|^\{$", re.IGNORECASE | re.DOTALL)


@dataclass(slots=True)
class _Branch:
    """One level of conditions; None if a condition cannot be read."""

    condition: bool | None
    text: str
    decided: bool = False  # an earlier branch was the one that runs


@dataclass(slots=True)
class _Script:
    variables: dict[str, str] = field(default_factory=dict)
    lists: dict[str, list[str]] = field(default_factory=dict)
    uncertain: dict[str, str] = field(default_factory=dict)  # list -> the condition it hangs on
    branches: list[_Branch] = field(default_factory=list)
    commands: list[list[str]] = field(default_factory=list)
    powershell: bool = False

    @property
    def runs(self) -> bool:
        return all(branch.condition is not False for branch in self.branches)

    def read(self, line: str) -> None:
        if self._is_condition(line) or not self.runs:
            return
        if match := _BASH_LIST.match(line):
            self._extend(match[1], self.words(match[3]), fresh=not match[2])
        elif match := _POWERSHELL_LIST.match(line):
            inside = match[3][2:-1] if match[3].startswith("@(") else ""
            self._extend(match[1], [self._text(each) for each in _split(inside, ",")], fresh=not match[2])
        elif (match := _POWERSHELL_ADD.match(line)) and match[1] in self.lists:
            self._extend(match[1], [self._text(match[2] or match[3] or "")], fresh=False)
        elif (match := _POWERSHELL_ADD.match(line)) and self.powershell and match[1] in self.variables and match[3]:
            longer = self.variables[match[1]] + self._text(match[3])
            self._note_condition(match[1], longer)
            self.variables[match[1]] = longer
        elif (match := _ASSIGNMENT.match(line)) and (_QUOTED.match(match[2]) or not re.search(r"\s--[A-Za-z]", line)):
            value = self._text(match[2]) if self.powershell else self.replaced(_assigned(match[2]))
            self._note_condition(match[1], value)
            if self.powershell and _OPERATION.search(match[2]):
                self.uncertain[match[1]] = match[2]  # its result is not computed
            self.variables[match[1]] = _computed(value) if re.match(r"\s*set\s+/a\s", line, re.IGNORECASE) else value
            self.lists.pop(match[1], None)
            if match[1] in self.uncertain:
                del self.variables[match[1]]
        elif re.search(r"(?:^|\s|\")--[A-Za-z]|\[[@*]\]", line):
            self.commands.append(self.words(line))

    def _is_condition(self, line: str) -> bool:
        """Read the start or the end of a branch; a statement on the same line is read in it."""
        stripped = line.strip()
        if match := (None if self.powershell else _BASH_IF.match(line)) or _POWERSHELL_IF.match(line):
            bash = match.re is _BASH_IF
            if match[1].lower() == "if":
                self.branches.append(_Branch(self._holds(match[2], bash), match[2]))
            elif self.branches:
                self._next_branch(self._holds(match[2], bash), match[2])
            for statement in re.split(r";\s*", match[3]):
                end = statement.strip() in ("fi", "}") or (not bash and statement.rstrip().endswith("}"))
                if statement.strip() not in ("fi", "}", ""):
                    self.read(statement.rstrip().rstrip("}") if not bash else statement)
                if end and self.branches:
                    self.branches.pop()
            return True
        if self.powershell and _POWERSHELL_BLOCK.match(stripped):  # a loop, a function, a block of its own
            unread = re.match(r"foreach|while|for|do|switch|try", stripped, re.IGNORECASE)
            self.branches.append(_Branch(None if unread else False, stripped))
        elif re.fullmatch(r"else\b.*|\}\s*else\s*\{", stripped, re.IGNORECASE) and self.branches:
            self._next_branch(True, self.branches[-1].text)
        elif stripped in ("fi", "}", "};", "fi;"):
            if self.branches:
                self.branches.pop()
        else:
            return False
        return True

    def _next_branch(self, condition: bool | None, text: str) -> None:
        branch = self.branches[-1]
        branch.decided |= branch.condition is True
        unknown = branch.condition is None
        branch.condition = False if branch.decided else None if unknown else condition
        branch.text = text

    def _extend(self, name: str, items: list[str], *, fresh: bool) -> None:
        self.lists[name] = items if fresh else [*self.lists.get(name, []), *items]
        if items or fresh:
            self._note_condition(name, items, fresh=fresh)

    def _note_condition(self, name: str, value: object, *, fresh: bool = True) -> None:
        """Remember the condition that a variable or list depends on, if it cannot be read."""
        unknown = next((branch.text for branch in self.branches if branch.condition is None), None)
        if unknown is not None and value and (not fresh or self.powershell) and self.variables.get(name) != value:
            self.uncertain[name] = unknown
        elif fresh and unknown is None:
            self.uncertain.pop(name, None)

    def _value(self, expression: str) -> str | None:
        """Return the value of a PowerShell expression; None if it is not known."""
        text = expression.strip()
        if (count := re.fullmatch(r"\$(\w+)\.(?:Count|Length)", text)) and count[1] in self.lists:
            return str(len(self.lists[count[1]]))
        if re.fullmatch(r"\$(?:true|false|null)", text, re.IGNORECASE):
            return text
        if name := re.fullmatch(r"\$(\w+)", text):
            if name[1] in self.lists:
                return "a list" if self.lists[name[1]] else ""
            if name[1] not in self.variables:
                return None if name[1] in self.uncertain else "$null"
        value = self._text(text)
        simple = re.fullmatch(r"[\w.+-]+|\$(?:env:)?\w+|\"[^\"]*\"|'[^']*'", text)
        if value.lower() in ("$true", "$false", "$null"):
            return value
        return None if not simple or UNSET_VARIABLE.search(value) else value

    def _holds(self, condition: str, bash: bool) -> bool | None:
        if self.powershell:
            return condition_holds(condition, self._value)
        text = condition.strip().removeprefix("[[").removeprefix("[").removesuffix("]]").removesuffix("]").strip()
        comparison = re.fullmatch(r"(.+?)\s+(==?|!=|-eq|-ne)\s+(.+)", text)
        if comparison:
            first, second = self._text(comparison[1]), self._text(comparison[3])
            same = first.lower() == second.lower() if not bash else first == second
            known = not UNSET_VARIABLE.search(first + second)
            return (same is (comparison[2] in ("==", "=", "-eq"))) if known else None
        negated, empty = bool(re.match(r"(?:!|-not\b)", text)), text.startswith("-z ")
        value = self._text(re.sub(r"^(?:!\s*|-not\s+|-n\s+|-z\s+)", "", text))
        if UNSET_VARIABLE.search(value) or re.match(r"-\w\s|\w+\s", value) or "&&" in value or "||" in value:
            return None
        holds = bool(value) if bash else value.lower() not in ("", "0", "$false", "false")
        return holds is not (negated or empty)

    def _text(self, expression: str) -> str:
        """Return the value of quoted texts and variables, joined by + in PowerShell."""
        parts = _split(expression.strip(), "+") if re.search(r"[\"']\s*\+|\+\s*\$", expression) else [expression]
        return "".join(self.replaced(_assigned(part)) for part in parts)

    def replaced(self, text: str) -> str:
        def value(match: re.Match[str]) -> str:
            name = match[1] or match[3] or match[4]
            return self.variables.get(name, match[2] if match[2] is not None else match[0])

        return _VARIABLE.sub(value, self.calculated(text))

    def calculated(self, text: str) -> str:
        """Return a text with the results of its calculations; names in them need no dollar."""

        def result(match: re.Match[str]) -> str:
            numbers = _BARE.sub(lambda name: self.variables.get(name[1], name[0]), match[1])
            return _computed(numbers, match[0])

        return _ARITHMETIC.sub(result, text)

    def words(self, line: str) -> list[str]:
        """Return the words of a command, with the items of its lists."""
        words: list[str] = []
        for word in _words(self.calculated(line)):
            match = _LIST_WORD.match(word)
            name = (match[1] or match[2]) if match else ""
            if name not in self.lists:
                words += _options(self.replaced(word))
                continue
            if name in self.uncertain:
                raise ConfigError(
                    f"{name}: the options in this list depend on a condition that cannot be read from the file, "
                    f"{for_message(self.uncertain[name])}; write them into the command"
                )
            words += [word for item in self.lists[name] for word in _options(item)]
        return _inner(words)


def script_commands(text: str) -> list[list[str]]:
    """Return the words of every command with options that a script would run."""
    script = _Script(powershell=is_powershell(text))
    plain = _OPTION_LINE.sub(" ", _CONTINUED.sub(" ", _COMMENT.sub("", text)))
    for line in powershell_statements(plain) if script.powershell else _statements(plain):
        script.read(line)
    return [words for words in script.commands if any(re.match(r"--[A-Za-z]", word) for word in words)]


def _statements(text: str) -> Iterator[str]:
    """Yield lines; those of a list that spans several, and options on lines of their own, are joined."""
    pending: list[str] = []
    for line in text.splitlines():
        pending.append(line)
        whole = " ".join(pending)
        if not _OPEN_LIST.match(whole) or len(pending) > 500:
            yield whole
            pending = []
    yield from pending


def _inner(words: list[str]) -> list[str]:
    """Return the words of a command for another shell: docker run image bash -c 'accelerate launch ...'."""
    for index in range(1, len(words) - 1):
        if re.fullmatch(r"-l?c", words[index]) and re.search(r"(?:^|/)\w*sh$", words[index - 1]):
            return _words(words[index + 1])
    return words


def _options(text: str) -> list[str]:
    """Return a word, or the words of one that holds several options, as bash splits it."""
    return _words(text) if re.match(r"--[\w-]+\s", text) else [text]


def _split(text: str, separator: str) -> list[str]:
    """Return the parts of an expression; a separator between quotes does not count."""
    pattern = rf"(?:\"[^\"]*\"|'[^']*'|[^{re.escape(separator)}\"'])+"
    return [part.strip() for part in re.findall(pattern, text) if part.strip()]


def _assigned(text: str) -> str:
    """Return the value of an assignment: the text between quotes, or up to a comment."""
    text = text.strip()
    if text[:1] in ("'", '"') and text.find(text[0], 1) > 0:
        return text[1 : text.index(text[0], 1)]
    return re.split(r"\s#", text)[0].strip().rstrip('"')


def _computed(text: str, otherwise: str = "") -> str:
    """Return the result of a calculation with integers, as shells round it; other text unchanged."""
    if not _CALCULATION.fullmatch(text):
        return otherwise or text
    total, pending = [0], "+"
    for number, sign in re.findall(r"(\d+)\s*([-+*/%]?)", text):
        value = int(number)
        if pending in "/%" and value == 0:
            return otherwise or text
        if pending in "*/%":
            quotient = abs(total[-1]) // max(value, 1) * (-1 if total[-1] < 0 else 1)
            total[-1] = {"*": total[-1] * value, "/": quotient, "%": total[-1] - quotient * value}[pending]
        else:
            total.append(value if pending == "+" else -value)
        pending = sign
    return str(sum(total))


def _words(line: str) -> list[str]:
    windows = bool(re.search(r"[A-Za-z]:\\", line))
    try:
        lexer = shlex.shlex(line, posix=True, punctuation_chars=False)
        lexer.whitespace_split = True
        lexer.commenters = "#"
        if windows:
            lexer.escape = ""
        return list(lexer)
    except ValueError:
        return line.replace('"', "").split()
