"""Where chat templates run: they are code of strangers, which a model's folder brings along."""

import json
import time
from collections.abc import Mapping
from datetime import datetime
from typing import Any

_OP = "chat"
_SECONDS = 1.0  # of its thread on the processor, which a template has
_LONGEST = 1 << 22  # characters, items or bits that multiplying may make at once
_OLDEST = (3, 1, 6)  # of jinja2: there are ways out of older sandboxes


def run_template(text: str, values: Mapping[str, Any]) -> str:
    """Return what a template makes of values, in a sandbox.

    Args:
        text: of the template.
        values: of Python's own kinds alone, as a template may call what methods they have.

    Raises:
        ValueError: it is no template, refuses the values, or fails.
        RuntimeError: jinja2 is too old for code of strangers.
    """
    import jinja2

    environment = _environment()
    try:
        tree = environment.parse(text)
        _watch_loops(tree)
        made: str = environment.from_string(tree).render(**values)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(
            f"{_OP}: the chat template is none that can be read: line {error.lineno}: {error}"
        ) from None
    except _TooLong:
        raise ValueError(
            f"{_OP}: the chat template takes over {_SECONDS:g} s of a processor, expected one that"
            " ends"
        ) from None
    except jinja2.TemplateError as error:  # what it raises itself, and what the sandbox forbids
        raise ValueError(f"{_OP}: the chat template refuses the messages: {error}") from None
    except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{_OP}: the chat template fails with {reason:.200}") from None
    return made


class _TooLong(Exception):
    """A template does not end."""


def _watch_loops(tree: Any) -> None:
    """Let each round of a loop begin with a look at the time; calls do so in any case.

    A round whose condition is false has nothing but that.
    """
    from jinja2 import nodes

    def look(line: int) -> Any:
        method = nodes.EnvironmentAttribute("check_time")
        return nodes.Call(method, [], [], None, None).set_lineno(line)

    for each in tree.find_all(nodes.For):
        each.body.insert(0, nodes.ExprStmt(look(each.lineno), lineno=each.lineno))
        if each.test is not None:
            each.test = nodes.And(look(each.lineno), each.test, lineno=each.lineno)


def _environment() -> Any:
    """Return what templates run in: a sandbox, with the names that they count on."""
    import jinja2

    version = tuple(int(part) for part in jinja2.__version__.split(".")[:3] if part.isdigit())
    if version < _OLDEST:
        raise RuntimeError(
            f"{_OP}: jinja2 is {jinja2.__version__}, expected"
            f" {'.'.join(map(str, _OLDEST))} or newer, as templates are code of strangers; pip"
            " install -U jinja2"
        )

    def refuse(message: Any) -> None:
        raise jinja2.TemplateError(str(message))

    environment = _sandbox()(
        trim_blocks=True, lstrip_blocks=True, extensions=[_generation(), "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=refuse,
        strftime_now=lambda form: datetime.now().strftime(form),
        namespace=_namespace(),
        dict=lambda *values, **fields: dict(*values, **fields),
    )
    return environment


def _sandbox() -> Any:
    """Return the class of an environment, which begins to count its time when it is made."""
    import jinja2
    from jinja2 import sandbox

    class Environment(sandbox.ImmutableSandboxedEnvironment):  # type: ignore[misc, unused-ignore]
        """A sandbox in which nothing takes long."""

        intercepted_binops = frozenset(("*", "**"))
        end = time.thread_time() + _SECONDS

        def check_time(self) -> bool:
            if time.thread_time() > self.end:
                raise _TooLong
            return True  # as a part of conditions

        def call(self, context: Any, what: Any, /, *args: Any, **fields: Any) -> Any:
            self.check_time()
            return super().call(context, what, *args, **fields)

        def call_filter(self, *args: Any, **fields: Any) -> Any:
            self.check_time()  # as map calls one for each item
            return super().call_filter(*args, **fields)

        def call_test(self, *args: Any, **fields: Any) -> Any:
            self.check_time()  # as select does
            return super().call_test(*args, **fields)

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if _size_of(operator, left, right) > _LONGEST:
                raise jinja2.TemplateError(f"{left!r:.20} {operator} {right!r:.20} is too large")
            return super().call_binop(context, operator, left, right)

    return Environment


def _generation() -> Any:
    """Return the class of a tag."""
    from jinja2 import ext, nodes

    class Generation(ext.Extension):  # type: ignore[misc, unused-ignore]
        """The tag around what a model said: for training; here its text is all that counts."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    return Generation


def _namespace() -> Any:
    """Return the class of what templates keep variables in."""
    from jinja2 import exceptions, utils

    class Namespace(utils.Namespace):  # type: ignore[misc, unused-ignore]
        """One in which a template stores nothing that Python itself would look for."""

        def __init__(*args: Any, **fields: Any) -> None:  # as a field may be called self
            own, *values = args
            given = dict(*values, **fields)
            for name in given:
                _check_name(name)
            utils.Namespace.__init__(own, given)

        def __setitem__(self, name: str, value: Any) -> None:
            _check_name(name)
            utils.Namespace.__setitem__(self, name, value)

    def _check_name(name: Any) -> None:
        if not isinstance(name, str) or name.startswith("_"):
            raise exceptions.TemplateError(f"a namespace with {name!r}")

    return Namespace


def _size_of(operator: str, left: Any, right: Any) -> float:
    """Return about how many items or bits an operation makes; 0 where that is not much."""
    if operator == "**":
        both = isinstance(left, int) and isinstance(right, int)
        return left.bit_length() * right if both and right > 0 else 0
    for some, times in ((left, right), (right, left)):
        if isinstance(times, int) and hasattr(some, "__len__"):
            return len(some) * times
    return 0


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON as it is; jinja2's own filter is for pages of HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
