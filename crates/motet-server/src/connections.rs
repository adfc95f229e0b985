//! Accepting connections and speaking HTTP/1.1 on them.
//!
//! A client that closes its connection ends its request: the future or body of the request is dropped, and with it
//! the engine's stream. Nothing here knows what is served.

use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use std::sync::Arc;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;

/// How long a connection may take to send the head of a request, idle keep-alive included.
const HEAD_TIMEOUT: Duration = Duration::from_secs(75);

/// How long to wait when the system refuses another connection (most often: no more file descriptors).
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Serves connections until the future is dropped; those under way go on and are watched by `graceful`.
/// At most `limit` at once; the rest wait in the listener's backlog.
pub(crate) async fn accept(
    listener: &TcpListener,
    router: &Router,
    graceful: &GracefulShutdown,
    limit: usize,
) {
    let places = Arc::new(Semaphore::new(limit));
    loop {
        let Ok(place) = places.clone().acquire_owned().await else { return };
        let Ok((socket, _)) = listener.accept().await else {
            tokio::time::sleep(ACCEPT_PAUSE).await;
            continue;
        };
        // A token is a small packet and must not wait for the next one. A failure costs only that.
        let _ = socket.set_nodelay(true);
        let service = TowerToHyperService::new(router.clone());
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(HEAD_TIMEOUT)
            .serve_connection(TokioIo::new(socket), service);
        let connection = graceful.watch(connection);
        tokio::spawn(async move {
            // An error is the client's leaving or its bad HTTP, which hyper has answered.
            let _ = connection.await;
            drop(place);
        });
    }
}
