//! A server of a test: on a free port of this machine, over an engine that the test brings.

// Each test file uses its part of this.
#![allow(dead_code, clippy::unwrap_used)]

pub(crate) mod client;
pub(crate) mod script;
pub(crate) mod vocabulary;

use std::error::Error;
use std::net::SocketAddr;
use std::sync::Arc;

use motet_engine::Engine;
use motet_server::{Model, Server, ServerError, ServerOptions, Stop};
use motet_text::ChatTemplate;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

/// A server that runs.
pub(crate) struct Running {
    pub(crate) address: SocketAddr,
    stop: mpsc::Sender<()>,
    served: JoinHandle<Result<(), ServerError>>,
}

/// The text side: ChatML over bytes, with or without thinking.
pub(crate) fn model(thinking: bool) -> Arc<Model> {
    let tokenizer = vocabulary::bytes();
    let thinks = thinking.then_some(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n<think>{{ '\n' }}",
    );
    Arc::new(Model {
        name: "tiny".to_string(),
        aliases: vec!["tiny-f32".to_string(), "some/alias".to_string()],
        template: ChatTemplate::new(thinks, None, Some("<|im_end|>")).unwrap(),
        tokenizer,
    })
}

/// Options of a test: a free port.
pub(crate) fn options() -> ServerOptions {
    ServerOptions { port: 0, ..ServerOptions::default() }
}

/// Serves over an engine that is or will be there.
pub(crate) fn start<E>(
    options: ServerOptions,
    model: Arc<Model>,
    engine: impl Future<Output = Result<Engine, E>> + Send + 'static,
) -> Running
where
    E: Into<Box<dyn Error + Send + Sync>> + Send + 'static,
{
    let server = Server::bind(options, model).unwrap();
    let address = server.address();
    let (stop, stopped) = Stop::channel();
    let served = tokio::spawn(server.serve(engine, stopped));
    Running { address, stop, served }
}

/// Serves over an engine that is there, without thinking.
pub(crate) fn start_with(options: ServerOptions, engine: &Engine) -> Running {
    let engine = engine.clone();
    start(options, model(false), async { Ok::<_, std::io::Error>(engine) })
}

/// Serves without an engine, as while loading.
pub(crate) fn start_loading(options: ServerOptions) -> Running {
    start(options, model(false), std::future::pending::<Result<Engine, std::io::Error>>())
}

impl Running {
    /// Waits until the engine has been handed in.
    pub(crate) async fn ready(self) -> Running {
        while client::get(self.address, "/health").await.status != 200 {
            tokio::task::yield_now().await;
        }
        self
    }

    /// Asks it to stop.
    pub(crate) async fn stop(&self) {
        self.stop.send(()).await.unwrap();
    }

    /// Waits until it has ended.
    pub(crate) async fn ended(self) -> Result<(), ServerError> {
        self.served.await.unwrap()
    }

    /// Whether it has ended.
    pub(crate) fn has_ended(&self) -> bool {
        self.served.is_finished()
    }
}
