//! What of a JSON schema can be enforced.
//!
//! A keyword that can't be is refused by its name and place, or left out and named where the caller is lenient. What is
//! true of everything (`"uniqueItems": false`, a `then` without `if`) is no reason to refuse. The rest is llguidance's
//! to say.

use llguidance::api::{GrammarInit, GrammarWithLexer, TopLevelGrammar, ValidationResult};
use serde_json::{Map, Value, json};

use crate::FormError;
use crate::forms::{limits, on_large_stack, one_line};

/// Bytes of a schema.
const BYTES: usize = 256 << 10;
/// Properties in all of a schema.
const PROPERTIES: usize = 1000;
/// Schemas within schemas.
const DEPTH: usize = 64;

/// Between the parts of a document: as much as any way of writing JSON has, and no more, for a model may never stop.
const SPACE: &str = r"[\x20\x09]{1,8}|\r?\n[\x20\x09]{0,64}";

/// Keywords that limit and can't be enforced.
const UNENFORCED: [&str; 16] = [
    "not",
    "if",
    "then",
    "else",
    "contains",
    "minContains",
    "maxContains",
    "uniqueItems",
    "propertyNames",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "unevaluatedItems",
    "unevaluatedProperties",
    "$dynamicRef",
    "$recursiveRef",
];

/// Formats of strings that can be enforced.
const FORMATS: [&str; 10] =
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"];

/// A schema as a grammar takes it.
#[derive(Debug, Clone, PartialEq)]
pub struct Fitted {
    /// The schema for `%json`, without what is not enforced.
    pub schema: Value,
    /// The keywords that are not enforced, each with its place; none of a strict one.
    pub unenforced: Vec<String>,
}

/// Makes a schema fit for a grammar.
///
/// # Errors
/// A keyword that can't be enforced, if it is `strict`; a schema that is none, is too large, or that nothing fits.
pub fn fit(schema: &Value, strict: bool) -> Result<Fitted, FormError> {
    let bytes = schema.to_string().len();
    if bytes > BYTES {
        return Err(FormError::TooLarge { what: "bytes of a JSON schema", found: bytes, most: BYTES });
    }
    let mut fitting = Fitting { strict, properties: 0, unenforced: Vec::new() };
    let mut schema = schema.clone();
    fitting.schema(&mut schema, &mut String::new(), 0)?;
    if let Value::Object(keywords) = &mut schema {
        let options = json!({ "lenient": !strict, "coerce_one_of": !strict, "whitespace_pattern": SPACE });
        keywords.insert("x-guidance".to_owned(), options);
    }
    let grammar = TopLevelGrammar::from_grammar(GrammarWithLexer::from_json_schema(schema.clone()));
    match on_large_stack(|| Ok(GrammarInit::Serialized(grammar).validate(None, limits())))? {
        ValidationResult::Valid => {}
        ValidationResult::Warnings(warnings) => fitting.unenforced.extend(warnings),
        ValidationResult::Error(error) => return Err(FormError::Schema { what: one_line(&error) }),
    }
    Ok(Fitted { schema, unenforced: fitting.unenforced })
}

struct Fitting {
    strict: bool,
    properties: usize,
    unenforced: Vec<String>,
}

impl Fitting {
    /// Goes over a schema and those in it; `place` is its JSON pointer.
    fn schema(&mut self, schema: &mut Value, place: &mut String, depth: usize) -> Result<(), FormError> {
        let Value::Object(keywords) = schema else { return Ok(()) };
        if depth > DEPTH {
            return Err(FormError::TooLarge { what: "schemas within schemas", found: depth, most: DEPTH });
        }
        keywords.remove("x-guidance");
        self.leave_out(keywords, place)?;
        for (keyword, value) in keywords.iter_mut() {
            let length = place.len();
            push(place, keyword);
            match (keyword.as_str(), value) {
                ("additionalProperties" | "items" | "additionalItems", value @ Value::Object(_)) => {
                    self.schema(value, place, depth + 1)?;
                }
                ("anyOf" | "oneOf" | "allOf" | "prefixItems" | "items", Value::Array(schemas)) => {
                    for (number, schema) in schemas.iter_mut().enumerate() {
                        let length = place.len();
                        push(place, &number.to_string());
                        self.schema(schema, place, depth + 1)?;
                        place.truncate(length);
                    }
                }
                ("properties" | "patternProperties" | "$defs" | "definitions", Value::Object(schemas)) => {
                    if keyword.ends_with("roperties") {
                        self.properties += schemas.len();
                    }
                    for (name, schema) in schemas {
                        let length = place.len();
                        push(place, name);
                        self.schema(schema, place, depth + 1)?;
                        place.truncate(length);
                    }
                }
                _ => {}
            }
            place.truncate(length);
        }
        if self.properties > PROPERTIES {
            let (found, most) = (self.properties, PROPERTIES);
            return Err(FormError::TooLarge { what: "properties in a JSON schema", found, most });
        }
        Ok(())
    }

    /// Takes out of a schema's keywords those that say nothing, and those that can't be enforced.
    fn leave_out(&mut self, keywords: &mut Map<String, Value>, place: &str) -> Result<(), FormError> {
        for keyword in UNENFORCED {
            if keywords.contains_key(keyword) && says_nothing(keyword, keywords) {
                keywords.remove(keyword);
            }
        }
        for keyword in UNENFORCED {
            if keywords.remove(keyword).is_some() {
                self.not_enforced(keyword.to_owned(), place)?;
            }
        }
        let format = keywords.get("format").and_then(Value::as_str).map(str::to_owned);
        if let Some(format) = format.filter(|format| !FORMATS.contains(&format.as_str())) {
            keywords.remove("format");
            self.not_enforced(format!("format: {format}"), place)?;
        }
        Ok(())
    }

    fn not_enforced(&mut self, keyword: String, place: &str) -> Result<(), FormError> {
        let place = if place.is_empty() { "its root".to_owned() } else { place.to_owned() };
        if self.strict {
            return Err(FormError::Keyword { keyword, place });
        }
        self.unenforced.push(format!("'{keyword}' at {place}"));
        Ok(())
    }
}

/// Whether a keyword is true of everything.
fn says_nothing(keyword: &str, keywords: &Map<String, Value>) -> bool {
    let value = &keywords[keyword];
    let allows_all = |schema: &Value| match schema {
        Value::Bool(allows) => *allows,
        Value::Object(keywords) => keywords.is_empty(),
        _ => false,
    };
    let is_empty = || value.as_object().is_some_and(Map::is_empty);
    match keyword {
        "uniqueItems" => *value == Value::Bool(false),
        "propertyNames" => allows_all(value) || *value == json!({ "type": "string" }),
        "unevaluatedItems" | "unevaluatedProperties" => allows_all(value),
        "if" => !keywords.contains_key("then") && !keywords.contains_key("else"),
        "then" | "else" => !keywords.contains_key("if") || allows_all(value),
        "minContains" | "maxContains" => !keywords.contains_key("contains"),
        "dependentRequired" | "dependentSchemas" | "dependencies" => is_empty(),
        "not" => *value == Value::Bool(false),
        _ => false,
    }
}

/// Appends a step to a JSON pointer.
fn push(place: &mut String, step: &str) {
    place.push('/');
    place.push_str(&step.replace('~', "~0").replace('/', "~1"));
}
