//! `GET /v1/models`: the one model that is served.

use std::sync::Arc;

use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};

use crate::app::App;
use crate::errors::ApiError;
use crate::openai::shapes::{ModelList, ModelObject};

/// The list.
pub(crate) async fn list(State(app): State<Arc<App>>) -> Json<ModelList> {
    Json(ModelList { object: "list", data: vec![served(&app)] })
}

/// One of it, by any of its names.
pub(crate) async fn one(
    State(app): State<Arc<App>>,
    id: Result<Path<String>, PathRejection>,
) -> Result<Json<ModelObject>, ApiError> {
    // What is no text is no model either.
    let Path(id) = id.unwrap_or_else(|_| Path("?".to_string()));
    if app.serves(&id) { Ok(Json(served(&app))) } else { Err(ApiError::no_model(&id, &app.model.name)) }
}

fn served(app: &App) -> ModelObject {
    ModelObject {
        id: app.model.name.clone(),
        object: "model",
        created: app.created,
        owned_by: "motet",
        max_model_len: app.engine().map(|engine| engine.limits().context),
    }
}
