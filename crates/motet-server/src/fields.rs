//! Reading a request body field by field, so that every complaint names the parameter it is about.
//!
//! A field that is absent and a field that is `null` are the same. Fields nobody asks for are ignored: what a client
//! may add without changing its answer must not cost it the answer. Never says what a *text* held: messages are
//! private.

use std::ops::RangeInclusive;

use serde_json::{Map, Value};

use crate::errors::ApiError;

/// The fields of one JSON object, and where it stands in the body ("" for the body itself, `messages[2].` inside).
pub(crate) struct Fields<'a> {
    object: &'a Map<String, Value>,
    place: String,
}

/// Parses a body of at most so many values.
///
/// # Errors
/// 400 with line and column where it is not JSON, 400 where it is not an object, 413 where it holds more values: a few
/// bytes each in the body, and many more in memory.
pub(crate) fn parse(body: &[u8], most: usize) -> Result<Map<String, Value>, ApiError> {
    if values(body) > most {
        return Err(ApiError::too_many_values(most));
    }
    if body.trim_ascii().is_empty() {
        return Err(ApiError::invalid(None, "The body is empty; it must be a JSON object.".to_string()));
    }
    match serde_json::from_slice(body) {
        Ok(Value::Object(object)) => Ok(object),
        Ok(other) => {
            Err(ApiError::invalid(None, format!("The body must be a JSON object, not {}.", kind(&other))))
        }
        Err(error) => Err(ApiError::invalid(None, format!("The body is not valid JSON: {error}."))),
    }
}

/// The values in JSON, at most: what is not JSON has no number of them.
fn values(body: &[u8]) -> usize {
    let (mut count, mut in_text, mut escaped) = (1, false, false);
    for &byte in body {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = in_text,
            b'"' => in_text = !in_text,
            b',' | b':' | b'[' | b'{' if !in_text => count += 1,
            _ => {}
        }
    }
    count
}

/// What a value is, for a complaint.
pub(crate) fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

impl<'a> Fields<'a> {
    /// The fields of the body.
    pub(crate) fn of(object: &'a Map<String, Value>) -> Fields<'a> {
        Fields { object, place: String::new() }
    }

    /// The fields of a value inside the body; `place` as in `messages[2]`.
    ///
    /// # Errors
    /// 400 where the value is not an object.
    pub(crate) fn inside(value: &'a Value, place: String) -> Result<Fields<'a>, ApiError> {
        match value {
            Value::Object(object) => Ok(Fields { object, place: place + "." }),
            other => Err(ApiError::invalid(
                Some(place.clone()),
                format!("'{place}' must be an object, not {}.", kind(other)),
            )),
        }
    }

    /// The full name of a field.
    pub(crate) fn name(&self, field: &str) -> String {
        format!("{}{field}", self.place)
    }

    /// The complaint that a field is not what it must be.
    pub(crate) fn must_be(&self, field: &str, what: &str) -> ApiError {
        let found = match self.get(field) {
            None => "is missing".to_string(),
            // A number or a boolean holds nothing private, and seeing it helps.
            Some(value @ (Value::Number(_) | Value::Bool(_))) => format!("is {value}"),
            Some(value) => format!("is {}", kind(value)),
        };
        let name = self.name(field);
        let message = format!("'{name}' must be {what}, but {found}.");
        ApiError::invalid(Some(name), message)
    }

    /// The complaint that a field is of the right type, and yet wrong.
    pub(crate) fn wrong(&self, field: &str, what: &str) -> ApiError {
        let name = self.name(field);
        let message = format!("'{name}' {what}.");
        ApiError::invalid(Some(name), message)
    }

    /// The complaint that something is understood, but cannot be done here.
    pub(crate) fn unsupported(&self, field: &str, message: impl Into<String>) -> ApiError {
        ApiError::invalid(Some(self.name(field)), message.into()).code("unsupported_value")
    }

    /// A field, unless absent or null.
    pub(crate) fn get(&self, field: &str) -> Option<&'a Value> {
        self.object.get(field).filter(|value| !value.is_null())
    }

    /// A number in a range.
    pub(crate) fn number(&self, field: &str, range: RangeInclusive<f64>) -> Result<Option<f64>, ApiError> {
        let Some(value) = self.get(field) else { return Ok(None) };
        match value.as_f64() {
            Some(number) if range.contains(&number) => Ok(Some(number)),
            _ => Err(self.must_be(field, &format!("a number from {} to {}", range.start(), range.end()))),
        }
    }

    /// A whole number in a range (`3.0` is one).
    pub(crate) fn integer(&self, field: &str, range: RangeInclusive<i64>) -> Result<Option<i64>, ApiError> {
        let Some(value) = self.get(field) else { return Ok(None) };
        match whole(value).filter(|number| range.contains(number)) {
            Some(number) => Ok(Some(number)),
            None if range == (i64::MIN..=i64::MAX) => Err(self.must_be(field, "a whole number of 64 bits")),
            None if *range.end() == i64::MAX => {
                Err(self.must_be(field, &format!("a whole number of at least {}", range.start())))
            }
            None => {
                Err(self.must_be(field, &format!("a whole number from {} to {}", range.start(), range.end())))
            }
        }
    }

    /// `true` or `false`.
    pub(crate) fn flag(&self, field: &str) -> Result<Option<bool>, ApiError> {
        match self.get(field) {
            None => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(*flag)),
            Some(_) => Err(self.must_be(field, "true or false")),
        }
    }

    /// A text.
    pub(crate) fn text(&self, field: &str) -> Result<Option<&'a str>, ApiError> {
        match self.get(field) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(_) => Err(self.must_be(field, "a string")),
        }
    }

    /// A list.
    pub(crate) fn list(&self, field: &str) -> Result<Option<&'a [Value]>, ApiError> {
        match self.get(field) {
            None => Ok(None),
            Some(Value::Array(values)) => Ok(Some(values)),
            Some(_) => Err(self.must_be(field, "an array")),
        }
    }

    /// An object, with the fields in it.
    pub(crate) fn object(&self, field: &str) -> Result<Option<&'a Map<String, Value>>, ApiError> {
        match self.get(field) {
            None => Ok(None),
            Some(Value::Object(object)) => Ok(Some(object)),
            Some(_) => Err(self.must_be(field, "an object")),
        }
    }
}

/// A JSON number without a fraction that fits 64 bits.
pub(crate) fn whole(value: &Value) -> Option<i64> {
    let exact = |number: f64| number.fract() == 0.0 && number.abs() < 9.0e15;
    value.as_i64().or_else(|| value.as_f64().filter(|&number| exact(number)).map(|number| number as i64))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn param_and_message(error: &ApiError) -> (Value, String) {
        let envelope = serde_json::to_value(error.envelope()).unwrap();
        (envelope["error"]["param"].clone(), envelope["error"]["message"].as_str().unwrap().to_string())
    }

    #[test]
    fn bad_json_is_told_with_its_place() {
        let (param, message) = param_and_message(&parse(b"{\"a\": 1,\n  \"b\" 2}", 1000).unwrap_err());
        assert_eq!(param, Value::Null);
        assert_eq!(message, "The body is not valid JSON: expected `:` at line 2 column 7.");
        let (_, message) = param_and_message(&parse(b"[1]", 1000).unwrap_err());
        assert_eq!(message, "The body must be a JSON object, not an array.");
        assert!(parse(b"{\"a\": 1e999}", 1000).is_err());
        assert!(parse(&[b"{\"a\": \"".as_slice(), &[0xff], b"\"}"].concat(), 1000).is_err());
        assert!(parse("[".repeat(100_000).as_bytes(), 1_000_000).is_err());
    }

    #[test]
    fn values_are_counted_outside_of_texts() {
        let body = br#"{"a,[": [1, {"b": "\",\\"}, ":"], "c": null}"#;
        // Two objects, an array, three keys, a number, two texts and null.
        assert_eq!(values(body), 10);
        assert!(parse(body, 10).is_ok());
        let error = parse(body, 9).unwrap_err();
        assert_eq!(
            param_and_message(&error).1,
            "The body holds more than the 9 values that this server takes."
        );
    }

    #[test]
    fn absent_and_null_are_the_same() {
        let body = json!({"a": null});
        let fields = Fields::of(body.as_object().unwrap());
        for name in ["a", "b"] {
            assert_eq!(fields.number(name, 0.0..=1.0), Ok(None));
            assert_eq!(fields.flag(name), Ok(None));
            assert_eq!(fields.text(name), Ok(None));
            assert_eq!(fields.list(name), Ok(None));
        }
    }

    #[test]
    fn a_wrong_field_is_named_with_what_was_expected_and_found() {
        let body = json!({"t": 3.5, "n": 1.5, "text": "private", "inner": {"x": []}});
        let fields = Fields::of(body.as_object().unwrap());
        let complaint = |result: Result<_, ApiError>| param_and_message(&result.unwrap_err());
        assert_eq!(
            complaint(fields.number("t", 0.0..=2.0).map(drop)),
            ("t".into(), "'t' must be a number from 0 to 2, but is 3.5.".to_string())
        );
        assert_eq!(
            complaint(fields.integer("n", 1..=8).map(drop)),
            ("n".into(), "'n' must be a whole number from 1 to 8, but is 1.5.".to_string())
        );
        // A text is never repeated.
        assert_eq!(
            complaint(fields.number("text", 0.0..=1.0).map(drop)).1,
            "'text' must be a number from 0 to 1, but is a string."
        );
        let inner = Fields::inside(&body["inner"], "inner".to_string()).unwrap();
        assert_eq!(
            complaint(inner.flag("x").map(drop)),
            ("inner.x".into(), "'inner.x' must be true or false, but is an array.".to_string())
        );
    }

    #[test]
    fn whole_numbers_may_be_written_as_floats() {
        assert_eq!(whole(&json!(3.0)), Some(3));
        assert_eq!(whole(&json!(-3)), Some(-3));
        for wrong in [json!(3.5), json!(1e300), json!("3"), json!(true)] {
            assert_eq!(whole(&wrong), None, "{wrong}");
        }
    }
}
