//! Which web pages may talk to this server from a browser.

use std::str::FromStr;
use std::time::Duration;

use axum::http::{HeaderValue, Method, header, request};
use tower_http::cors::{AllowHeaders, AllowOrigin, CorsLayer};

/// The origins that are allowed.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Cors {
    /// Pages served from this machine (localhost, 127.0.0.0/8, \[::1\]), at any port.
    #[default]
    Loopback,
    /// Every page.
    Any,
    /// No page.
    None,
    /// These origins (`https://chat.example`), to the letter.
    Origins(Vec<String>),
}

/// A list of origins that cannot be.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error(
    "'{0}' is not an origin; expected 'loopback', '*', 'none' or a comma-separated list such as 'https://chat.example,http://10.0.0.2:3000'"
)]
pub struct CorsError(String);

impl FromStr for Cors {
    type Err = CorsError;

    fn from_str(text: &str) -> Result<Cors, CorsError> {
        match text.trim() {
            "loopback" => Ok(Cors::Loopback),
            "*" => Ok(Cors::Any),
            "none" => Ok(Cors::None),
            list => list
                .split(',')
                .map(|origin| checked(origin.trim()))
                .collect::<Result<_, _>>()
                .map(Cors::Origins),
        }
    }
}

/// A scheme, a host and at most a port, as browsers send it.
fn checked(origin: &str) -> Result<String, CorsError> {
    let (_, host) = origin.split_once("://").ok_or_else(|| CorsError(origin.to_string()))?;
    let plain = |byte: u8| byte.is_ascii_graphic() && !b"/?#@*".contains(&byte);
    if host.is_empty() || !host.bytes().all(plain) {
        return Err(CorsError(origin.to_string()));
    }
    Ok(origin.to_ascii_lowercase())
}

impl Cors {
    /// The layer that answers preflights and marks responses.
    pub(crate) fn layer(&self) -> CorsLayer {
        let origins = match self.clone() {
            Cors::Any => AllowOrigin::any(),
            Cors::None => AllowOrigin::list([]),
            Cors::Loopback => AllowOrigin::predicate(|origin: &HeaderValue, _: &request::Parts| {
                origin.to_str().is_ok_and(is_loopback)
            }),
            Cors::Origins(list) => AllowOrigin::predicate(move |origin: &HeaderValue, _: &request::Parts| {
                list.iter().any(|allowed| origin.as_bytes() == allowed.as_bytes())
            }),
        };
        CorsLayer::new()
            .allow_origin(origins)
            .allow_methods([Method::GET, Method::POST])
            .allow_headers(AllowHeaders::mirror_request())
            .expose_headers([header::RETRY_AFTER])
            .max_age(Duration::from_secs(600))
    }
}

/// Whether an origin is a page of this machine.
fn is_loopback(origin: &str) -> bool {
    let Some(("http" | "https", authority)) = origin.split_once("://") else { return false };
    let host = match authority.rsplit_once(':') {
        Some((host, port)) if !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit()) => host,
        _ => authority,
    };
    let loopback_v4 = || host.parse().is_ok_and(|address: std::net::Ipv4Addr| address.is_loopback());
    host == "localhost" || host == "[::1]" || loopback_v4()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_is_this_machine_only() {
        for origin in [
            "http://localhost",
            "http://localhost:3000",
            "https://127.0.0.1:8443",
            "http://[::1]:5173",
            "http://127.1.2.3",
        ] {
            assert!(is_loopback(origin), "{origin}");
        }
        for origin in [
            "null",
            "http://localhost.evil.example",
            "http://evil.example:80",
            "http://127.0.0.1.evil.example",
            "http://127.0.0.1@evil.example",
            "file://localhost",
            "http://128.0.0.1",
            "http://[::2]",
            "http://localhost:x",
            "",
        ] {
            assert!(!is_loopback(origin), "{origin}");
        }
    }

    #[test]
    fn lists_are_checked() {
        assert_eq!("*".parse(), Ok(Cors::Any));
        assert_eq!("none".parse(), Ok(Cors::None));
        assert_eq!("loopback".parse(), Ok(Cors::Loopback));
        let list = vec!["https://chat.example".to_string(), "http://10.0.0.2:3000".to_string()];
        assert_eq!("https://Chat.example, http://10.0.0.2:3000".parse(), Ok(Cors::Origins(list)));
        for wrong in [
            "",
            "chat.example",
            "https://",
            "https://chat.example/",
            "https://*.example",
            "https://a.example,,",
        ] {
            assert!(wrong.parse::<Cors>().is_err(), "{wrong}");
        }
    }
}
