//! What an answer must be: which tools it may or must call, and the form of its text.

use serde_json::{Value, json};

use crate::errors::ApiError;
use crate::fields::Fields;

/// What a request demands of its answer.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Demand {
    /// The tools that may be called, in the shape of Chat Completions.
    pub(crate) tools: Vec<Value>,
    pub(crate) choice: Choice,
    /// Whether an answer may hold several calls.
    pub(crate) parallel: bool,
    pub(crate) form: Option<Form>,
}

/// Whether tools are called.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) enum Choice {
    /// As the model likes.
    #[default]
    Auto,
    /// Not at all.
    None,
    /// At least one.
    Required,
    /// This one.
    Named(String),
}

/// The form of a text.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Form {
    /// A JSON object.
    Json,
    /// JSON by a schema; if it is strict, all of the schema counts or the request is refused.
    Schema { schema: Value, strict: bool },
    /// A regular expression.
    Regex(String),
    /// One of these.
    Choice(Vec<String>),
    /// A grammar in Lark.
    Lark(String),
}

/// Reads the form under whatever name a server gave to it.
///
/// # Errors
/// 400 where it is malformed, where it is in a language that is not spoken here, where there are two.
pub(crate) fn read_form(body: &Fields<'_>) -> Result<Option<Form>, ApiError> {
    let mut forms = Vec::new();
    forms.extend(read_response_format(body)?);
    if let Some(wishes) = body.get("structured_outputs") {
        let wishes = Fields::inside(wishes, "structured_outputs".to_string())?;
        forms.extend(read_wishes(&wishes, ["json", "regex", "choice", "grammar"])?);
        if wishes.flag("json_object")? == Some(true) {
            forms.push(Form::Json);
        }
        refuse(&wishes, &["structural_tag"])?;
    }
    forms.extend(read_wishes(body, ["guided_json", "guided_regex", "guided_choice", "guided_grammar"])?);
    forms.extend(read_wishes(body, ["json_schema", "regex", "", ""])?);
    refuse(body, &["grammar", "ebnf", "structural_tag", "guided_json_object", "format"])?;
    if forms.len() > 1 {
        let message = "The request asks for several forms of the answer; it may ask for one.".to_string();
        return Err(ApiError::invalid(Some("response_format".to_string()), message));
    }
    Ok(forms.pop())
}

/// `response_format`.
fn read_response_format(body: &Fields<'_>) -> Result<Option<Form>, ApiError> {
    let Some(format) = body.get("response_format") else { return Ok(None) };
    let format = Fields::inside(format, "response_format".to_string())?;
    match format.text("type")? {
        Some("text") => Ok(None),
        // llama.cpp takes a schema here, too.
        Some("json_object") => Ok(Some(match format.get("schema") {
            None => Form::Json,
            Some(schema) => Form::Schema { schema: schema.clone(), strict: false },
        })),
        Some("json_schema") => {
            let named = format.get("json_schema");
            let named = named.ok_or_else(|| format.must_be("json_schema", "an object"))?;
            read_named_schema(&Fields::inside(named, format.name("json_schema"))?).map(Some)
        }
        _ => Err(format.unsupported(
            "type",
            "'response_format.type' must be 'text', 'json_object' or 'json_schema'; for regular expressions, choices and \
             grammars in Lark there is 'structured_outputs'.",
        )),
    }
}

/// `schema` and `strict`, as OpenAI's APIs hold them.
///
/// # Errors
/// 400 where one is not what it must be.
pub(crate) fn read_named_schema(named: &Fields<'_>) -> Result<Form, ApiError> {
    let strict = named.flag("strict")?.unwrap_or(false);
    match named.get("schema") {
        None => Ok(Form::Json),
        Some(schema @ (Value::Object(_) | Value::Bool(_))) => {
            Ok(Form::Schema { schema: schema.clone(), strict })
        }
        Some(_) => Err(named.must_be("schema", "a JSON schema")),
    }
}

/// A schema, a regular expression, a choice or a grammar under the names that are given; an empty name is none.
fn read_wishes(
    fields: &Fields<'_>,
    [json, regex, choice, lark]: [&str; 4],
) -> Result<Option<Form>, ApiError> {
    if let Some(schema) = fields.get(json) {
        let parsed = match schema {
            // vLLM takes a schema as text as well.
            Value::String(text) => serde_json::from_str(text).ok(),
            schema => Some(schema.clone()),
        };
        let schema = parsed.filter(|schema| schema.is_object() || schema.is_boolean());
        let schema = schema.ok_or_else(|| fields.must_be(json, "a JSON schema"))?;
        return Ok(Some(Form::Schema { schema, strict: false }));
    }
    if let Some(regex) = fields.text(regex)? {
        return Ok(Some(Form::Regex(regex.to_owned())));
    }
    if let Some(list) = fields.list(choice)? {
        let texts = list.iter().map(|text| text.as_str().map(str::to_owned)).collect::<Option<Vec<_>>>();
        let texts = texts.filter(|texts| !texts.is_empty());
        return texts
            .map(|texts| Some(Form::Choice(texts)))
            .ok_or_else(|| fields.must_be(choice, "a list of texts"));
    }
    Ok(fields.text(lark)?.map(|grammar| Form::Lark(grammar.to_owned())))
}

fn refuse(fields: &Fields<'_>, names: &[&str]) -> Result<(), ApiError> {
    match names.iter().find(|name| fields.get(name).is_some()) {
        None => Ok(()),
        Some(name) => {
            let message = format!(
                "'{}' is not supported; use 'response_format' for JSON, or 'structured_outputs' with 'regex', 'choice' or \
                 'grammar' (in Lark, as llguidance reads it; GBNF is not spoken here).",
                fields.name(name)
            );
            Err(fields.unsupported(name, message))
        }
    }
}

/// Reads `tools`, `tool_choice` and `parallel_tool_calls` of Chat Completions.
///
/// # Errors
/// 400 where one is malformed, where a tool is named that is not there.
pub(crate) fn read_demand(body: &Fields<'_>) -> Result<Demand, ApiError> {
    for old in ["functions", "function_call"] {
        if body.get(old).is_some() {
            let message = format!("'{old}' is not supported; use 'tools' and 'tool_choice'.");
            return Err(body.unsupported(old, message));
        }
    }
    let mut tools = Vec::new();
    for (index, tool) in body.list("tools")?.unwrap_or_default().iter().enumerate() {
        let fields = Fields::inside(tool, format!("tools[{index}]"))?;
        // Tools of other types are the client's own affair and are left out.
        if fields.text("type")?.is_some_and(|kind| kind != "function") {
            continue;
        }
        let function = fields.get("function").ok_or_else(|| fields.must_be("function", "an object"))?;
        let function = Fields::inside(function, fields.name("function"))?;
        let name = function.text("name")?.filter(|name| !name.is_empty());
        name.ok_or_else(|| function.must_be("name", "a string"))?;
        function.object("parameters")?;
        function.flag("strict")?;
        tools.push(tool.clone());
    }
    let choice = read_choice(body, &mut tools)?;
    if choice == Choice::None {
        tools.clear();
    }
    Demand {
        tools,
        choice,
        parallel: body.flag("parallel_tool_calls")?.unwrap_or(true),
        form: read_form(body)?,
    }
    .checked(body)
}

/// `tool_choice`; `allowed_tools` leaves only those.
fn read_choice(body: &Fields<'_>, tools: &mut Vec<Value>) -> Result<Choice, ApiError> {
    let wrong = || {
        body.must_be(
            "tool_choice",
            "'none', 'auto', 'required', or an object that names a function or allowed tools",
        )
    };
    let named = |object: &Fields<'_>| {
        let name = object.get("function").and_then(|function| function.get("name")).or(object.get("name"));
        name.and_then(Value::as_str).map(str::to_owned)
    };
    match body.get("tool_choice") {
        None => Ok(Choice::Auto),
        Some(Value::String(mode)) => mode_of(mode).ok_or_else(wrong),
        Some(object) => {
            let object = Fields::inside(object, "tool_choice".to_string())?;
            match object.text("type")? {
                Some("function") => named(&object).map(Choice::Named).ok_or_else(wrong),
                Some("allowed_tools") => {
                    let inner = match object.get("allowed_tools") {
                        Some(inner) => Fields::inside(inner, object.name("allowed_tools"))?,
                        None => object,
                    };
                    let mut names = Vec::new();
                    for (index, tool) in inner.list("tools")?.unwrap_or_default().iter().enumerate() {
                        let tool = Fields::inside(tool, inner.name(&format!("tools[{index}]")))?;
                        names.push(named(&tool).ok_or_else(wrong)?);
                    }
                    tools.retain(|tool| names.iter().any(|name| name_of(tool) == name));
                    mode_of(inner.text("mode")?.unwrap_or("auto")).ok_or_else(wrong)
                }
                _ => Err(wrong()),
            }
        }
    }
}

fn mode_of(mode: &str) -> Option<Choice> {
    match mode {
        "auto" => Some(Choice::Auto),
        "none" => Some(Choice::None),
        "required" | "any" => Some(Choice::Required),
        _ => None,
    }
}

/// The name of a tool in the shape of Chat Completions.
pub(crate) fn name_of(tool: &Value) -> &str {
    tool["function"]["name"].as_str().unwrap_or_default()
}

/// A tool in the shape of Chat Completions.
pub(crate) fn function(
    name: &str,
    description: Option<&str>,
    parameters: Option<&Value>,
    strict: bool,
) -> Value {
    let mut function = json!({ "name": name });
    if let Some(description) = description {
        function["description"] = description.into();
    }
    if let Some(parameters) = parameters {
        function["parameters"] = parameters.clone();
    }
    if strict {
        function["strict"] = true.into();
    }
    json!({ "type": "function", "function": function })
}

impl Demand {
    /// Checks that what is demanded can be had.
    ///
    /// # Errors
    /// 400 where a call is demanded and there are no tools, or not the named one.
    pub(crate) fn checked(self, body: &Fields<'_>) -> Result<Demand, ApiError> {
        match &self.choice {
            Choice::Required if self.tools.is_empty() => {
                Err(body.wrong("tool_choice", "demands a call, but 'tools' holds no function"))
            }
            Choice::Named(name) if !self.tools.iter().any(|tool| name_of(tool) == name) => {
                Err(body.wrong("tool_choice", "names a function that 'tools' does not hold"))
            }
            _ => Ok(self),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(body: &Value) -> Result<Demand, ApiError> {
        read_demand(&Fields::of(body.as_object().unwrap()))
    }

    fn param(body: &Value) -> String {
        let error = serde_json::to_value(read(body).unwrap_err().envelope()).unwrap();
        error["error"]["param"].as_str().unwrap().to_owned()
    }

    fn tool(name: &str) -> Value {
        function(name, None, Some(&json!({"type": "object"})), false)
    }

    #[test]
    fn tools_are_functions_and_the_rest_is_left_out() {
        let both = json!([tool("f"), {"type": "web_search"}]);
        let demand = read(&json!({"tools": both})).unwrap();
        assert_eq!((demand.tools, demand.choice, demand.parallel), (vec![tool("f")], Choice::Auto, true));
        let none =
            read(&json!({"tools": both, "tool_choice": "none", "parallel_tool_calls": false})).unwrap();
        assert_eq!((none.tools, none.parallel), (vec![], false));
    }

    #[test]
    fn a_choice_is_read_in_all_its_shapes() {
        let tools = json!([tool("f"), tool("g")]);
        let choice = |choice: Value| read(&json!({"tools": tools, "tool_choice": choice})).unwrap();
        assert_eq!(choice(json!("required")).choice, Choice::Required);
        let named = Choice::Named("g".to_owned());
        assert_eq!(choice(json!({"type": "function", "function": {"name": "g"}})).choice, named);
        assert_eq!(choice(json!({"type": "function", "name": "g"})).choice, named);
        let allowed = json!({"type": "allowed_tools", "allowed_tools": {"mode": "required",
            "tools": [{"type": "function", "function": {"name": "g"}}]}});
        let allowed = choice(allowed);
        assert_eq!((allowed.choice, allowed.tools), (Choice::Required, vec![tool("g")]));
    }

    #[test]
    fn what_cannot_be_had_is_named() {
        for (body, place) in [
            (json!({"tools": [{"type": "function"}]}), "tools[0].function"),
            (json!({"tools": [{"type": "function", "function": {}}]}), "tools[0].function.name"),
            (
                json!({"tools": [{"function": {"name": "f", "parameters": 5}}]}),
                "tools[0].function.parameters",
            ),
            (json!({"tools": {}}), "tools"),
            (json!({"functions": []}), "functions"),
            (json!({"tool_choice": "required"}), "tool_choice"),
            (json!({"tools": [tool("f")], "tool_choice": "sometimes"}), "tool_choice"),
            (json!({"tools": [tool("f")], "tool_choice": {"type": "function", "name": "h"}}), "tool_choice"),
            (json!({"response_format": "json"}), "response_format"),
            (json!({"response_format": {"type": "grammar"}}), "response_format.type"),
            (json!({"response_format": {"type": "json_schema"}}), "response_format.json_schema"),
            (
                json!({"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}}),
                "response_format.json_schema.schema",
            ),
            (json!({"response_format": {"type": "json_object"}, "regex": "a"}), "response_format"),
            (json!({"structured_outputs": {"choice": []}}), "structured_outputs.choice"),
            (json!({"structured_outputs": {"structural_tag": "x"}}), "structured_outputs.structural_tag"),
            (json!({"guided_json": 7}), "guided_json"),
            (json!({"grammar": "root ::= x"}), "grammar"),
            (json!({"ebnf": "root ::= x"}), "ebnf"),
        ] {
            assert_eq!(param(&body), place, "{body}");
        }
    }

    #[test]
    fn a_form_has_many_names() {
        let schema = json!({"type": "object"});
        let form = |body: Value| read(&body).unwrap().form;
        let lenient = Some(Form::Schema { schema: schema.clone(), strict: false });
        assert_eq!(form(json!({"response_format": {"type": "text"}})), None);
        assert_eq!(form(json!({"response_format": null})), None);
        assert_eq!(form(json!({"response_format": {"type": "json_object"}})), Some(Form::Json));
        let named = json!({"name": "x", "schema": schema, "strict": true});
        assert_eq!(
            form(json!({"response_format": {"type": "json_schema", "json_schema": named}})),
            Some(Form::Schema { schema: schema.clone(), strict: true })
        );
        for same in [
            json!({"response_format": {"type": "json_object", "schema": schema}}),
            json!({"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}),
            json!({"guided_json": schema}),
            json!({"guided_json": schema.to_string()}),
            json!({"json_schema": schema}),
            json!({"structured_outputs": {"json": schema}}),
        ] {
            assert_eq!(form(same.clone()), lenient, "{same}");
        }
        assert_eq!(form(json!({"regex": "a+"})), Some(Form::Regex("a+".to_owned())));
        let choice = Some(Form::Choice(vec!["a".to_owned(), "b".to_owned()]));
        assert_eq!(form(json!({"guided_choice": ["a", "b"]})), choice);
        assert_eq!(form(json!({"structured_outputs": {"choice": ["a", "b"]}})), choice);
        let lark = Some(Form::Lark("start: /a/".to_owned()));
        assert_eq!(form(json!({"structured_outputs": {"grammar": "start: /a/"}})), lark);
    }
}
