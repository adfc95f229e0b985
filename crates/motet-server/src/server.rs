//! The life of the server: bind, load, serve, drain, end.
//!
//! The socket is bound before the model is loaded, so that a port in use is said at once; while loading, `/health`
//! says so. When asked to stop, the server takes no new requests, lets running answers finish for a while, and ends.

use std::error::Error;
use std::io;
use std::net::{SocketAddr, TcpListener as StdListener};
use std::sync::Arc;
use std::time::Duration;

use hyper_util::server::graceful::GracefulShutdown;
use motet_engine::{Engine, Line};
use tokio::net::TcpListener;
use tokio::select;
use tokio::sync::mpsc;
use tokio::time::timeout;

use crate::app::{App, Model};
use crate::ask::{READERS, READING};
use crate::connections::{CONNECTION, accept};
use crate::cors::Cors;
use crate::routes::routes;

/// How to serve.
#[derive(Debug, Clone)]
pub struct ServerOptions {
    /// Address or name to listen on.
    pub host: String,
    /// Port to listen on; 0 takes a free one.
    pub port: u16,
    /// What requests under `/v1` must carry as `Authorization: Bearer KEY` or `x-api-key: KEY`; `None`: nothing.
    pub api_key: Option<String>,
    /// Whether any model's name means the one that is served: agents ask for names of their own.
    pub any_model: bool,
    /// Which web pages may ask.
    pub cors: Cors,
    /// Bytes of a request's body at most.
    pub max_body: usize,
    /// Bytes of all bodies that are held at once; beyond that the answer is 503.
    pub max_bodies: usize,
    /// How long a body may take to arrive.
    pub body_timeout: Duration,
    /// Connections at once; more wait.
    pub max_connections: usize,
    /// How long running answers may take to finish after a signal.
    pub drain_timeout: Duration,
    /// Told how many answers the end waits for, if there are any.
    pub on_drain: Option<fn(usize)>,
    /// After how much silence a stream gets a comment.
    pub comment_interval: Duration,
}

impl Default for ServerOptions {
    fn default() -> ServerOptions {
        ServerOptions {
            host: "127.0.0.1".to_string(),
            port: 8080,
            api_key: None,
            any_model: false,
            cors: Cors::default(),
            max_body: 4 << 20,
            max_bodies: 16 << 20,
            body_timeout: Duration::from_secs(60),
            max_connections: 256,
            drain_timeout: Duration::from_secs(30),
            on_drain: None,
            comment_interval: Duration::from_secs(5),
        }
    }
}

impl ServerOptions {
    /// What clients may make the server hold at most, for the plan's [`front_end`](motet_engine::Options::front_end).
    pub fn memory(&self) -> Vec<Line> {
        let reading = self.max_bodies + READERS * READING * self.max_body;
        let line = |name: String, bytes: usize| Line { name, bytes: bytes as u64, parts: Vec::new() };
        vec![
            line(format!("{} connections", self.max_connections), self.max_connections * CONNECTION),
            line("requests that are being read".to_string(), reading),
        ]
    }
}

/// Why there is no server.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServerError {
    /// Somebody else listens there.
    #[error("port {port} on {host} is in use; stop what listens there, or choose another with --port")]
    PortInUse {
        /// The address asked for.
        host: String,
        /// The port asked for.
        port: u16,
    },
    /// The address cannot be listened on.
    #[error(
        "cannot listen on host {host}, port {port}: {source}; --host takes an address of this machine or a name of it"
    )]
    Listen {
        /// The address asked for.
        host: String,
        /// The port asked for.
        port: u16,
        /// What the system says.
        source: io::Error,
    },
    /// The system refused threads, sockets or signals.
    #[error("cannot serve: {0}")]
    System(#[from] io::Error),
    /// The engine could not be made.
    #[error(transparent)]
    Load(Box<dyn Error + Send + Sync>),
}

/// A server that is bound and not yet serving.
#[derive(Debug)]
pub struct Server {
    listener: StdListener,
    address: SocketAddr,
    options: ServerOptions,
    model: Arc<Model>,
}

impl Server {
    /// Takes the port.
    ///
    /// # Errors
    /// The port is in use; the address is not one of this machine, or needs rights.
    pub fn bind(options: ServerOptions, model: Arc<Model>) -> Result<Server, ServerError> {
        let (host, port) = (options.host.clone(), options.port);
        // Brackets belong to an IPv6 address in a URL only.
        let plain = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(&host);
        let bound = StdListener::bind((plain, port)).and_then(|listener| {
            listener.set_nonblocking(true)?;
            Ok((listener.local_addr()?, listener))
        });
        match bound {
            Ok((address, listener)) => Ok(Server { listener, address, options, model }),
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
                Err(ServerError::PortInUse { host, port })
            }
            Err(source) => Err(ServerError::Listen { host, port, source }),
        }
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Serves on threads of its own until SIGTERM or Ctrl-C; `load` makes the engine meanwhile, on another.
    ///
    /// # Errors
    /// Those of [`serve`](Self::serve).
    pub fn run<E>(self, load: impl FnOnce() -> Result<Engine, E> + Send + 'static) -> Result<(), ServerError>
    where
        E: Into<Box<dyn Error + Send + Sync>> + Send + 'static,
    {
        // The cores are the engine's; text and sockets need little.
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .max_blocking_threads(4)
            .thread_name("motet-http")
            .enable_all()
            .build()?;
        let served = runtime.block_on(async {
            let stop = Stop::signals()?;
            let engine = async {
                match tokio::task::spawn_blocking(load).await {
                    Ok(result) => result.map_err(Into::into),
                    Err(panic) => Err(panic.into()),
                }
            };
            self.serve(engine, stop).await
        });
        // A load under way cannot be called back; it ends with the process.
        runtime.shutdown_background();
        served
    }

    /// Serves until `stop` says so, and drains. The engine comes when it is ready.
    ///
    /// # Errors
    /// The engine's own, if it cannot be made; the system's.
    pub async fn serve<E>(
        self,
        engine: impl Future<Output = Result<Engine, E>>,
        mut stop: Stop,
    ) -> Result<(), ServerError>
    where
        E: Into<Box<dyn Error + Send + Sync>>,
    {
        let listener = TcpListener::from_std(self.listener)?;
        let max_connections = self.options.max_connections;
        let app = Arc::new(App::new(self.options, self.model));
        let router = routes(app.clone());
        let graceful = GracefulShutdown::new();
        select! {
            () = accept(&listener, &router, &graceful, max_connections) => {}
            ended = live(&app, engine, &mut stop) => ended?,
        }
        drop(listener);
        // What is written is written; connections that are idle close at once.
        let _ = timeout(FAREWELL, graceful.shutdown()).await;
        Ok(())
    }
}

/// How long the last bytes of broken-off answers may take.
const FAREWELL: Duration = Duration::from_secs(1);

/// From loading to the end of draining.
async fn live<E>(
    app: &App,
    engine: impl Future<Output = Result<Engine, E>>,
    stop: &mut Stop,
) -> Result<(), ServerError>
where
    E: Into<Box<dyn Error + Send + Sync>>,
{
    select! {
        engine = engine => app.start(engine.map_err(|error| ServerError::Load(error.into()))?),
        () = stop.asked() => return Ok(()),
    }
    stop.asked().await;
    app.drain();
    if let (Some(tell), waits_for @ 1..) = (app.options.on_drain, app.answers_under_way()) {
        tell(waits_for);
    }
    select! {
        _ = timeout(app.options.drain_timeout, app.all_answered()) => {}
        () = stop.asked() => {}
    }
    if let Some(engine) = app.engine().cloned() {
        // Waits for the step under way, however long it takes: nobody here waits for that.
        tokio::task::spawn_blocking(move || engine.close());
    }
    let _ = timeout(FAREWELL, app.all_answered()).await;
    Ok(())
}

/// Tells a server to stop: once to drain, twice to end at once.
#[derive(Debug)]
pub struct Stop(mpsc::Receiver<()>);

impl Stop {
    /// A way to stop a server from within the process: each message asks once. If the sender goes, nobody asks.
    pub fn channel() -> (mpsc::Sender<()>, Stop) {
        let (sender, receiver) = mpsc::channel(2);
        (sender, Stop(receiver))
    }

    /// Stops at SIGTERM and Ctrl-C. Must be called inside a tokio runtime.
    ///
    /// # Errors
    /// The system does not let signals be handled.
    pub fn signals() -> io::Result<Stop> {
        let (sender, stop) = Stop::channel();
        #[cfg(unix)]
        {
            use tokio::signal::unix::{SignalKind, signal};
            let (mut terminate, mut interrupt) =
                (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
            tokio::spawn(async move {
                loop {
                    select! {
                        _ = terminate.recv() => {}
                        _ = interrupt.recv() => {}
                    }
                    if sender.send(()).await.is_err() {
                        return;
                    }
                }
            });
        }
        #[cfg(not(unix))]
        tokio::spawn(async move {
            while tokio::signal::ctrl_c().await.is_ok() && sender.send(()).await.is_ok() {}
        });
        Ok(stop)
    }

    /// Returns when somebody asks.
    async fn asked(&mut self) {
        if self.0.recv().await.is_none() {
            std::future::pending().await
        }
    }
}
