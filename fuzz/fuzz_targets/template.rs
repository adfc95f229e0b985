//! Any conversation through real chat templates, and any template: a prompt, or an error that says something.
//!
//! The first byte chooses the template, the last choice being a template made of the input. The rest is a conversation:
//! JSON as a request has it, or a message for each line.

#![no_main]

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use motet_text::{ChatTemplate, Conversation, TextError};
use serde_json::{Value, json};

static TEMPLATES: LazyLock<Vec<ChatTemplate>> = LazyLock::new(|| {
    let of = |source| ChatTemplate::new(source, Some("<s>"), Some("</s>")).expect("a template that parses");
    vec![
        of(None),
        of(Some(include_str!("../../crates/motet-text/tests/fixtures/templates/constructs.jinja"))),
        of(Some(include_str!("../../crates/motet-text/tests/fixtures/templates/deepseek_r1_distill.jinja"))),
        of(Some(include_str!("../../crates/motet-text/tests/fixtures/templates/glm4moe.jinja"))),
        of(Some(include_str!("../../crates/motet-text/tests/fixtures/templates/like_gemma3.jinja"))),
        of(Some(include_str!("../../crates/motet-text/tests/fixtures/templates/like_llama3.jinja"))),
        of(Some(include_str!("../../crates/motet-text/tests/fixtures/templates/qwen3.jinja"))),
        of(Some(include_str!("../../crates/motet-text/tests/fixtures/templates/qwen35.jinja"))),
        of(Some(include_str!("../../crates/motet-text/tests/fixtures/templates/smollm2.jinja"))),
    ]
});

fuzz_target!(|bytes: &[u8]| {
    let [which, bytes @ ..] = bytes else { return };
    let text = String::from_utf8_lossy(bytes);
    match TEMPLATES.get(usize::from(*which) % (TEMPLATES.len() + 1)) {
        Some(template) => render(template, &text),
        None => match ChatTemplate::new(Some(&text), Some("<s>"), Some("</s>")) {
            Ok(template) => render(&template, "hello\nhi\nhow are you?"),
            Err(error) => assert!(error.to_string().len() > 10),
        },
    }
});

fn render(template: &ChatTemplate, text: &str) {
    let body: Value = serde_json::from_str(text).unwrap_or_default();
    let role = |n: usize| ["user", "assistant", "system", "tool"][n % 4];
    let messages = body["messages"].as_array().cloned().unwrap_or_else(|| {
        (0..).zip(text.lines()).map(|(n, line)| json!({ "role": role(n), "content": line })).collect()
    });
    let conversation = Conversation {
        messages: &messages,
        tools: body["tools"].as_array().map(Vec::as_slice),
        add_generation_prompt: true,
        kwargs: body["chat_template_kwargs"].as_object(),
    };
    match template.render(&conversation) {
        Ok(rendered) => {
            assert!(rendered.marks.is_sorted());
            assert!(rendered.marks.iter().all(|&mark| rendered.prompt.is_char_boundary(mark)));
        }
        Err(TextError::Template { message }) => assert!(!message.is_empty()),
        Err(error) => panic!("a template fails with its own error, not with {error}"),
    }
}
