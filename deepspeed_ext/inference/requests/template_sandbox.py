"""Where chat templates run: they are code of strangers, which a model's folder brings along."""

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

_OP = "chat"
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
        made: str = environment.from_string(text).render(**values)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(
            f"{_OP}: the chat template is none that can be read: line {error.lineno}: {error}"
        ) from None
    except jinja2.TemplateError as error:  # what it raises itself, and what the sandbox forbids
        raise ValueError(f"{_OP}: the chat template refuses the messages: {error}") from None
    except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{_OP}: the chat template fails with {reason:.200}") from None
    return made


def _environment() -> Any:
    """Return what templates run in: a sandbox, with the names that they count on."""
    import jinja2
    from jinja2 import ext, nodes, sandbox, utils

    version = tuple(int(part) for part in jinja2.__version__.split(".")[:3] if part.isdigit())
    if version < _OLDEST:
        raise RuntimeError(
            f"{_OP}: jinja2 is {jinja2.__version__}, expected"
            f" {'.'.join(map(str, _OLDEST))} or newer, as templates are code of strangers; pip"
            " install -U jinja2"
        )

    class Generation(ext.Extension):  # type: ignore[misc, unused-ignore]
        """The tag around what a model said: for training; here its text is all that counts."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

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
            raise jinja2.TemplateError(f"a namespace with {name!r}")

    def refuse(message: Any) -> None:
        raise jinja2.TemplateError(str(message))

    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=refuse,
        strftime_now=lambda form: datetime.now().strftime(form),
        namespace=Namespace,
        dict=lambda *values, **fields: dict(*values, **fields),
    )
    return environment


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
