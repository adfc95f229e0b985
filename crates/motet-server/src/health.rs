//! `GET /health`: may requests be sent here? `GET /livez`: should this process be left alone?
//!
//! They differ while the server is loading or draining: not ready, but alive.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use motet_engine::Health;
use serde_json::json;

use crate::app::{App, Phase};

/// Readiness.
pub(crate) async fn health(State(app): State<Arc<App>>) -> Response {
    let state = state(&app);
    report(state == "ok", state)
}

/// Liveness.
pub(crate) async fn livez(State(app): State<Arc<App>>) -> Response {
    let state = state(&app);
    report(!matches!(state, "stalled" | "closed"), state)
}

/// In one word how the server is.
fn state(app: &App) -> &'static str {
    match (app.phase(), app.engine().map(|engine| engine.health())) {
        // A step that does not end is what a restart cures, in every phase.
        (_, Some(Health::Stalled)) => "stalled",
        (Phase::Draining, _) | (_, Some(Health::Draining)) => "draining",
        (_, None | Some(Health::Loading)) => "loading",
        (_, Some(Health::Closed)) => "closed",
        (_, Some(Health::Ready)) => "ok",
    }
}

fn report(good: bool, state: &'static str) -> Response {
    let status = if good { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (status, Json(json!({ "status": state }))).into_response()
}
