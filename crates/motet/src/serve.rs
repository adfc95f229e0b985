//! `motet serve`: the HTTP server over an engine.

use std::sync::Arc;

use clap::Args;
use motet_server::{Cors, Model as ServedModel, Server, ServerOptions};

use crate::model::{self, Model};
use crate::options::{EngineArgs, ModelArgs};
use crate::output::note;
use crate::{Outcome, bytes};

/// Arguments of `motet serve`.
#[derive(Debug, Args)]
pub(crate) struct Serve {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    engine: EngineArgs,
    /// Address to listen on
    #[arg(long, default_value = "127.0.0.1")]
    host: String,
    /// Port to listen on
    #[arg(long, default_value_t = 8080)]
    port: u16,
    /// Key that clients must send as `Authorization: Bearer KEY`
    #[arg(long, env = "MOTET_API_KEY", hide_env_values = true)]
    api_key: Option<String>,
    /// Web pages that may call: loopback, *, none, or a comma-separated list of origins
    #[arg(long, default_value = "loopback", value_name = "ORIGINS")]
    cors: Cors,
}

impl Serve {
    pub(crate) fn run(self) -> Outcome {
        let model = Model::open(self.model.model.as_deref())?;
        let device = model::device(self.model.threads())?;
        let plan = model::plan(&model.weights.network, &self.engine.served_options(), &device)?;
        let Model { name, aliases, tokenizer, template, weights } = model;
        let network = Arc::clone(&weights.network);
        let served = ServedModel { name: name.clone(), aliases, tokenizer, template };
        let options = ServerOptions {
            host: self.host,
            port: self.port,
            api_key: self.api_key.filter(|key| !key.is_empty()),
            cors: self.cors,
            on_drain: Some(|answers| {
                note!("waiting for answers under way ({answers}), at most 30 s; Ctrl-C again ends at once");
            }),
            ..self.engine.server_options()
        };
        let server = Server::bind(options, Arc::new(served))?;
        note!(
            "{} ({}), {} conversations of {} tokens at once, {} in all; http://{}/v1",
            name,
            network.architecture,
            plan.sessions,
            plan.context,
            bytes::show(plan.total),
            server.address(),
        );
        if self.model.model.is_none() {
            note!(
                "This is the built-in demonstration model: it shows the server, not what models can do. A real one: \
                 motet pull smollm2-135m, then motet serve --model FILE"
            );
        }
        server.run(move || {
            let engine = weights.start(plan, device);
            engine.wait_until_loaded().map(|()| engine)
        })?;
        Ok(())
    }
}
