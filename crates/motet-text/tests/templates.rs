//! Templates render as Python's jinja2 renders them in transformers (`tools/chat_templates.py`).
#![allow(clippy::unwrap_used, reason = "tests, and functions of theirs")]

use std::path::{Path, PathBuf};

use motet_text::{ChatTemplate, Conversation, TextError};
use serde_json::{Map, Value, json};

/// The templates of the repository, or those of the folder that `MOTET_TEMPLATES` names.
fn folder() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/templates");
    std::env::var_os("MOTET_TEMPLATES").map_or(here, PathBuf::from)
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn template(name: &str) -> ChatTemplate {
    let source = read(&folder().join(format!("{name}.jinja")));
    ChatTemplate::new(Some(&source), Some("<s>"), Some("</s>")).unwrap()
}

fn conversations() -> Map<String, Value> {
    let here = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/templates/conversations.json");
    serde_json::from_str(&read(&here)).unwrap()
}

fn conversation(value: &Value) -> Conversation<'_> {
    Conversation {
        messages: value["messages"].as_array().unwrap(),
        tools: value.get("tools").map(|tools| tools.as_array().unwrap().as_slice()),
        add_generation_prompt: value["add_generation_prompt"].as_bool().unwrap(),
        kwargs: value.get("kwargs").map(|kwargs| kwargs.as_object().unwrap()),
    }
}

#[test]
fn templates_render_as_in_transformers() {
    let expected: Map<String, Value> = serde_json::from_str(&read(&folder().join("expected.json"))).unwrap();
    let conversations = conversations();
    let mut wrong = Vec::new();
    for (name, cases) in &expected {
        let template = template(name);
        for (case, expected) in cases.as_object().unwrap() {
            let found = match template.render(&conversation(&conversations[case])) {
                Ok(rendered) => json!({ "text": rendered.prompt }),
                Err(TextError::Template { message }) if expected.get("raises").is_some() => {
                    json!({ "raises": message })
                }
                Err(TextError::Template { .. }) => json!({ "fails": true }),
                Err(error) => panic!("{error}"),
            };
            if &found != expected {
                wrong.push(format!("{name}, {case}:\n found    {found}\n expected {expected}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{} differ\n{}", wrong.len(), wrong.join("\n"));
    assert!(expected.len() >= 5);
}

fn message(role: &str, content: &str) -> Value {
    json!({ "role": role, "content": content })
}

fn render(source: &str, messages: &[Value]) -> Result<String, TextError> {
    let template = ChatTemplate::new(Some(source), None, None)?;
    let conversation = Conversation { messages, ..Conversation::default() };
    Ok(template.render(&conversation)?.prompt)
}

#[test]
fn a_template_fails_with_its_own_message() {
    let error = render("{{ raise_exception('Only two turns, please') }}", &[]).unwrap_err();
    assert!(
        matches!(&error, TextError::Template { message } if message == "Only two turns, please"),
        "{error}"
    );
    assert_eq!(
        error.to_string(),
        "the model's chat template refuses this conversation: Only two turns, please"
    );
    let in_a_macro = "{% macro m() %}{{ raise_exception('Deep') }}{% endmacro %}{{ m() }}";
    let error = render(in_a_macro, &[]).unwrap_err();
    assert!(matches!(&error, TextError::Template { message } if message == "Deep"), "{error}");
}

#[test]
fn errors_say_where() {
    let error = render("fine\n{% for m in messages %}", &[]).unwrap_err();
    assert!(matches!(&error, TextError::TemplateSyntax { message } if message.contains("line 2")), "{error}");
    let error = render("\n\n{{ messages[0].role + 1 }}", &[message("user", "x")]).unwrap_err();
    assert!(matches!(&error, TextError::Template { message } if message.contains("line 3")), "{error}");
}

#[test]
fn a_template_that_never_ends_is_stopped() {
    let source =
        "{% for a in range(100000) %}{% for b in range(100000) %}{% set c = a %}{% endfor %}{% endfor %}";
    assert!(matches!(render(source, &[]).unwrap_err(), TextError::Template { .. }));
}

/// Found by fuzzing: the tags of a file may be broken in any way.
#[test]
fn broken_tags_are_a_syntax_error() {
    for source in ["{%}", "{%", "{%%}", "{%}{% generation %}", "{% generation", "{%-}-%}"] {
        let error = ChatTemplate::new(Some(source), None, None).unwrap_err();
        assert!(matches!(error, TextError::TemplateSyntax { .. }), "{source}: {error}");
    }
}

#[test]
fn a_template_cannot_ask_for_any_amount_of_memory() {
    let error = render("{{ 'x' * 9999999999999 }}", &[message("user", "hi")]).unwrap_err();
    assert!(matches!(error, TextError::Template { .. }), "{error}");
}

#[test]
fn without_a_template_it_is_chatml() {
    let template = ChatTemplate::new(None, None, None).unwrap();
    assert!(template.is_default() && !template.has_reasoning());
    let messages = [message("system", "Be kind."), message("user", "Hi")];
    let conversation =
        Conversation { messages: &messages, add_generation_prompt: true, ..Conversation::default() };
    let expected =
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n";
    assert_eq!(template.render(&conversation).unwrap().prompt, expected);
}

#[test]
fn kwargs_reach_the_template_but_replace_no_message() {
    let source = "{{ mode }} {{ messages | length }} {{ bos_token }}";
    let template = ChatTemplate::new(Some(source), Some("<s>"), None).unwrap();
    let kwargs = json!({ "mode": { "deep": [1, true] }, "messages": [1, 2, 3] });
    let conversation = Conversation { kwargs: kwargs.as_object(), ..Conversation::default() };
    assert_eq!(template.render(&conversation).unwrap().prompt, "{'deep': [1, True]} 0 <s>");
}

#[test]
fn arguments_of_tool_calls_may_be_json_in_text() {
    let call = |arguments: Value| {
        json!({ "role": "assistant", "content": null, "tool_calls": [{ "type": "function",
            "function": { "name": "f", "arguments": arguments } }] })
    };
    let source = "{{ messages[0].tool_calls[0].function.arguments | tojson }}";
    let object = json!({ "b": 1, "a": ["x"] });
    assert_eq!(render(source, &[call(object)]).unwrap(), r#"{"b": 1, "a": ["x"]}"#);
    assert_eq!(render(source, &[call(json!(r#"{"b":1,"a":["x"]}"#))]).unwrap(), r#"{"b": 1, "a": ["x"]}"#);
    assert_eq!(render(source, &[call(json!("not JSON"))]).unwrap(), r#""not JSON""#);
}

#[test]
fn parts_are_one_text_and_developers_the_system() {
    let parts = json!([{ "type": "text", "text": "One" }, { "type": "text", "text": "two" }]);
    let messages = [json!({ "role": "developer", "content": parts })];
    let source = "{{ messages[0].role }}: {{ messages[0].content }}";
    assert_eq!(render(source, &messages).unwrap(), "system: One\ntwo");
    let knows = "{# developer #}{{ messages[0].role }}";
    assert_eq!(render(knows, &messages).unwrap(), "developer");
    // What is no text stays as it is, for templates that know it.
    let image = [json!({ "role": "user", "content": [{ "type": "image_url" }] })];
    assert_eq!(render("{{ messages[0].content[0].type }}", &image).unwrap(), "image_url");
}

#[test]
fn messages_of_any_shape_do_no_harm() {
    for odd in
        [json!(null), json!(1), json!("text"), json!([]), json!({}), json!({ "role": 1, "tool_calls": 2 })]
    {
        let _ = template("qwen3").render(&Conversation { messages: &[odd], ..Conversation::default() });
    }
}

#[test]
fn the_date_is_todays() {
    // Twice, for the sake of midnight.
    let today = || {
        let output =
            std::process::Command::new("date").arg("+%d %b %Y, %j").env("LC_ALL", "C").output().unwrap();
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    };
    let before = today();
    let rendered = render("{{ strftime_now('%d %b %Y, %j') }}", &[]).unwrap();
    assert!(rendered == before || rendered == today(), "{rendered}, {before}");
}

#[test]
fn marks_are_the_ends_of_messages() {
    let messages = [
        message("system", "Be brief."),
        message("user", "Hi"),
        message("assistant", "Hello!"),
        message("user", "Bye"),
    ];
    let conversation =
        Conversation { messages: &messages, add_generation_prompt: true, ..Conversation::default() };
    let rendered = template("smollm2").render(&conversation).unwrap();
    let ends = rendered.marks.iter().map(|&mark| &rendered.prompt[..mark]).collect::<Vec<_>>();
    let turns = [
        "<|im_start|>system\nBe brief.<|im_end|>\n",
        "<|im_start|>user\nHi<|im_end|>\n",
        "<|im_start|>assistant\nHello!<|im_end|>\n",
        "<|im_start|>user\nBye<|im_end|>\n",
    ];
    assert_eq!(ends, [turns[..1].concat(), turns[..2].concat(), turns[..3].concat(), turns[..4].concat()]);
}

#[test]
fn marks_are_true_prefixes_whatever_the_template() {
    let conversations = conversations();
    for entry in std::fs::read_dir(folder()).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|extension| extension != "jinja") {
            continue;
        }
        let template = template(path.file_stem().unwrap().to_str().unwrap());
        for each in conversations.values() {
            let Ok(rendered) = template.render(&conversation(each)) else { continue };
            assert!(rendered.marks.is_sorted_by(|a, b| a < b));
            for &mark in &rendered.marks {
                let shorter = (1..=each["messages"].as_array().unwrap().len()).any(|count| {
                    let messages = &each["messages"].as_array().unwrap()[..count];
                    let beginning =
                        Conversation { messages, add_generation_prompt: false, ..conversation(each) };
                    template.render(&beginning).is_ok_and(|short| short.prompt == rendered.prompt[..mark])
                });
                assert!(shorter, "{}: {mark}", path.display());
            }
        }
    }
}

#[test]
fn a_long_conversation_has_marks_at_its_first_and_newest_messages() {
    let messages: Vec<Value> =
        (0..1000).map(|i| message(["user", "assistant"][i % 2], &format!("Turn {i}."))).collect();
    let conversation = Conversation { messages: &messages, ..Conversation::default() };
    let rendered = template("qwen3").render(&conversation).unwrap();
    assert!((2..=17).contains(&rendered.marks.len()), "{}", rendered.marks.len());
    assert!(rendered.prompt[..rendered.marks[0]].ends_with("Turn 0.<|im_end|>\n"));
}
