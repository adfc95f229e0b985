//! HTTP for motet: OpenAI's interface over one engine.
//!
//! ```text
//! connection ──> route ──> fields ──> messages ──> prompt ──> engine's request
//!                                                                   │
//!      chunk or whole <── shape <── part <── voice (text) <── event of its stream
//! ```
//!
//! A request is read and checked completely, its prompt rendered and tokenised, and put into the engine's queue before
//! a byte of the response goes out: everything that can be wrong with it is a status code. From there the response
//! owns the engine's stream; a client that leaves drops the response, and with it the stream, and the engine stops
//! computing for it.
//!
//! This crate talks to [`motet_engine::Engine`] and `motet-text` only, never to a device. Neither logs nor metrics
//! ever hold a prompt or an answer.

#![allow(dead_code, reason = "interfaces that use all of the core are on their way")]

mod answer;
mod app;
mod ask;
mod auth;
mod body;
mod connections;
mod cors;
mod demand;
mod errors;
mod fields;
mod health;
mod hearing;
mod limits;
mod metrics;
mod openai;
mod params;
mod reader;
mod respond;
mod routes;
mod server;
mod shape;
mod socket;
mod talk;
mod voice;

pub use app::Model;
pub use cors::{Cors, CorsError};
pub use server::{Server, ServerError, ServerOptions, Stop};

#[cfg(test)]
#[path = "../tests/common/vocabulary.rs"]
mod vocabulary;
