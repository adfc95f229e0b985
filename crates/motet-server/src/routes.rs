//! Which path leads where.

use std::sync::Arc;

use axum::Router;
use axum::http::{Method, Uri};
use axum::middleware::from_fn_with_state;
use axum::routing::{get, post};

use crate::app::App;
use crate::errors::ApiError;
use crate::{auth, chat, completions, health, metrics, models};

/// All routes. The layers from the outside in: browsers' preflights, counting, the key.
pub(crate) fn routes(app: Arc<App>) -> Router {
    let mut keyed = Router::new()
        .route("/v1/chat/completions", post(chat::chat))
        .route("/v1/completions", post(completions::completions))
        .route("/v1/models", get(models::list))
        .route("/v1/models/{*id}", get(models::one));
    if let Some(key) = &app.options.api_key {
        keyed = keyed.route_layer(from_fn_with_state(Arc::from(key.as_str()), auth::require_key));
    }
    keyed
        .route("/health", get(health::health))
        .route("/livez", get(health::livez))
        .route("/metrics", get(metrics::metrics))
        .fallback(async |method: Method, uri: Uri| ApiError::no_route(method.as_str(), uri.path()))
        .method_not_allowed_fallback(async |method: Method, uri: Uri| {
            ApiError::no_method(method.as_str(), uri.path())
        })
        .layer(from_fn_with_state(app.clone(), metrics::count_requests))
        .layer(app.options.cors.layer())
        .with_state(app)
}
