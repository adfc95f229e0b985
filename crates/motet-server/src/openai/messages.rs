//! From the messages of a request to what the chat template takes.
//!
//! A message keeps every field it came with (a template may know more than this server); only what has several
//! spellings is made one: `content` is a string, and `developer` is `system`.

use serde_json::{Map, Value};

use crate::errors::{ApiError, shown};
use crate::fields::Fields;

/// Who may speak.
const ROLES: [&str; 5] = ["system", "developer", "user", "assistant", "tool"];

/// The messages for the template.
///
/// # Errors
/// 400 with the place of the message and part that is wrong or of an unsupported type.
pub(crate) fn read_messages(body: &Fields<'_>) -> Result<Vec<Value>, ApiError> {
    let messages = body.list("messages")?.ok_or_else(|| body.must_be("messages", "an array of messages"))?;
    if messages.is_empty() {
        return Err(ApiError::invalid(
            Some("messages".to_string()),
            "'messages' must hold at least one message, but is empty.".to_string(),
        ));
    }
    let read = |(index, message)| read_message(message, format!("messages[{index}]"));
    messages.iter().enumerate().map(read).collect()
}

/// One message.
fn read_message(value: &Value, place: String) -> Result<Value, ApiError> {
    let fields = Fields::inside(value, place)?;
    let one_of_the_roles = || format!("one of {}", ROLES.join(", "));
    let role = fields.text("role")?.ok_or_else(|| fields.must_be("role", &one_of_the_roles()))?;
    if !ROLES.contains(&role) {
        return Err(
            fields.wrong("role", &format!("must be {}, but is '{}'", one_of_the_roles(), shown(role)))
        );
    }
    let mut message = value.as_object().cloned().unwrap_or_default();
    message.insert("role".into(), if role == "developer" { "system" } else { role }.into());

    // An empty list and null mean no calls, whatever a template makes of them.
    let calls = fields.list("tool_calls")?.unwrap_or_default();
    if calls.is_empty() {
        message.shift_remove("tool_calls");
    }
    for (index, call) in calls.iter().enumerate() {
        let call = Fields::inside(call, fields.name(&format!("tool_calls[{index}]")))?;
        call.object("function")?.ok_or_else(|| call.must_be("function", "an object"))?;
    }

    let content = match fields.get("content") {
        Some(Value::String(text)) => text.clone(),
        Some(Value::Array(parts)) => read_parts(parts, &fields)?,
        // An assistant that called tools, refused or only thought has no content; a tool may have nothing to say.
        None if role == "assistant" || role == "tool" => String::new(),
        _ => return Err(fields.must_be("content", "a string or an array of text parts")),
    };
    message.insert("content".into(), content.into());
    Ok(Value::Object(message))
}

/// The text of a content made of parts, a line each.
fn read_parts(parts: &[Value], message: &Fields<'_>) -> Result<String, ApiError> {
    let read = |(index, part)| {
        let part = Fields::inside(part, message.name(&format!("content[{index}]")))?;
        let field = match part.text("type")? {
            Some("text") => "text",
            Some("refusal") => "refusal",
            Some(other) => {
                let message = format!(
                    "'{}' is '{}', but this model reads text only: content parts must have the type 'text'.",
                    part.name("type"),
                    shown(other)
                );
                return Err(part.unsupported("type", message));
            }
            None => return Err(part.must_be("type", "'text'")),
        };
        part.text(field)?.ok_or_else(|| part.must_be(field, "a string"))
    };
    Ok(parts.iter().enumerate().map(read).collect::<Result<Vec<_>, _>>()?.join("\n"))
}

/// Extra variables of the template.
///
/// # Errors
/// 400 where one is not what it must be.
pub(crate) fn read_template_variables(body: &Fields<'_>) -> Result<Map<String, Value>, ApiError> {
    let mut variables = body.object("chat_template_kwargs")?.cloned().unwrap_or_default();
    // Open WebUI and OpenRouter write `reasoning: {effort}`.
    let effort = match body.text("reasoning_effort")? {
        Some(effort) => Some(effort),
        None => match body.get("reasoning") {
            Some(reasoning @ Value::Object(_)) => {
                Fields::inside(reasoning, "reasoning".to_string())?.text("effort")?
            }
            _ => None,
        },
    };
    if let Some(effort) = effort {
        think(&mut variables, effort);
    }
    for switch in ["enable_thinking", "thinking"] {
        if let Some(Value::Bool(thinks)) = body.get(switch) {
            variables.insert("enable_thinking".into(), (*thinks).into());
        }
    }
    if let Some(verbosity) = body.text("verbosity")? {
        variables.entry("verbosity").or_insert(verbosity.into());
    }
    Ok(variables)
}

/// Tells the template how much to think: in the words of templates with levels, and of those with a switch.
pub(crate) fn think(variables: &mut Map<String, Value>, effort: &str) {
    variables.entry("reasoning_effort").or_insert(effort.into());
    if matches!(effort, "none" | "minimal") {
        variables.entry("enable_thinking").or_insert(false.into());
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(messages: Value) -> Result<Vec<Value>, ApiError> {
        let body = json!({ "messages": messages });
        read_messages(&Fields::of(body.as_object().unwrap()))
    }

    #[test]
    fn spellings_become_one() {
        let messages = read(json!([
            {"role": "developer", "content": "be brief"},
            {"role": "user", "name": "ann", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": null, "reasoning_content": "hm",
             "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{\"x\": 1}"}}]},
            {"role": "tool", "tool_call_id": "1", "content": "42"},
            {"role": "assistant", "tool_calls": []},
        ]));
        let expected = json!([
            {"role": "system", "content": "be brief"},
            {"role": "user", "name": "ann", "content": "a\nb"},
            {"role": "assistant", "content": "", "reasoning_content": "hm",
             "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{\"x\": 1}"}}]},
            {"role": "tool", "tool_call_id": "1", "content": "42"},
            {"role": "assistant", "content": ""},
        ]);
        assert_eq!(Value::Array(messages.unwrap()), expected);
    }

    #[test]
    fn what_is_wrong_is_placed() {
        let image = json!({"type": "image_url", "image_url": {"url": "data:"}});
        for (messages, param) in [
            (json!(null), "messages"),
            (json!("hi"), "messages"),
            (json!([]), "messages"),
            (json!(["hi"]), "messages[0]"),
            (json!([{"content": "hi"}]), "messages[0].role"),
            (json!([{"role": "function", "content": "hi"}]), "messages[0].role"),
            (json!([{"role": "user"}]), "messages[0].content"),
            (json!([{"role": "user", "content": 5}]), "messages[0].content"),
            (json!([{"role": "user", "content": ["hi"]}]), "messages[0].content[0]"),
            (json!([{"role": "user", "content": [{"text": "hi"}]}]), "messages[0].content[0].type"),
            (json!([{"role": "user", "content": [{"type": "text"}]}]), "messages[0].content[0].text"),
            (
                json!([{"role": "user", "content": "a"}, {"role": "user", "content": [image]}]),
                "messages[1].content[0].type",
            ),
            (json!([{"role": "assistant", "tool_calls": [{}]}]), "messages[0].tool_calls[0].function"),
        ] {
            let error = read(messages.clone()).unwrap_err();
            let error = serde_json::to_value(error.envelope()).unwrap();
            assert_eq!(error["error"]["param"], param, "{messages}");
        }
        let error = read(json!([{"role": "user", "content": [{"type": "input_audio"}]}])).unwrap_err();
        let error = serde_json::to_value(error.envelope()).unwrap();
        assert!(error["error"]["message"].as_str().unwrap().contains("'input_audio'"));
    }
}
