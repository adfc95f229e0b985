"""Renders chat templates as Hugging Face's transformers does; the values that motet-text is tested against.

    pip install jinja2
    python tools/chat_templates.py [FOLDER]

For each *.jinja in FOLDER (default: motet-text's fixtures) and each conversation of conversations.json (there, or in the
fixtures) writes what comes out, or the message of raise_exception, to FOLDER/expected.json.
"""

import datetime
import json
import pathlib
import sys

import jinja2
import jinja2.ext
import jinja2.sandbox

FIXTURES = pathlib.Path(__file__).parent.parent / "crates/motet-text/tests/fixtures/templates"
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


class Generation(jinja2.ext.Extension):
    """{% generation %}…{% endgeneration %} marks the text of the assistant and prints it."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.ScopedEvalContextModifier([], body, lineno=line)


def raise_exception(message):
    raise jinja2.exceptions.TemplateError(message)


def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def environment():
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return env


def render(template, conversation):
    try:
        text = template.render(
            messages=conversation["messages"],
            tools=conversation.get("tools"),
            documents=None,
            add_generation_prompt=conversation["add_generation_prompt"],
            **TOKENS,
            **conversation.get("kwargs", {}),
        )
        return {"text": text}
    except jinja2.exceptions.UndefinedError:
        return {"fails": True}
    except jinja2.exceptions.TemplateError as error:
        return {"raises": str(error)}
    except Exception:  # whatever Python raises inside an expression
        return {"fails": True}


def main():
    folder = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else FIXTURES
    conversations = folder / "conversations.json"
    if not conversations.exists():
        conversations = FIXTURES / "conversations.json"
    conversations = json.loads(conversations.read_text())
    env = environment()
    expected = {}
    for path in sorted(folder.glob("*.jinja")):
        template = env.from_string(path.read_text())
        expected[path.stem] = {name: render(template, each) for name, each in conversations.items()}
    (folder / "expected.json").write_text(json.dumps(expected, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
